package design

import "math/rand/v2"

// Plan is a list of arms to run, in order.
type Plan struct {
	Seed uint64    `json:"seed"`
	Runs []Planned `json:"runs"`
}

// Planned is one run of a plan.
type Planned struct {
	Arm   Arm `json:"arm"`
	Block int `json:"block"` // which repetition, from 0
}

// Interleave plans each arm once in each of the given number of blocks, in a
// fresh order each time, so that what changes with time meets every arm alike.
// The same seed gives the same plan.
func Interleave(seed uint64, arms []Arm, blocks int) Plan {
	r := rand.New(rand.NewPCG(seed, 0))
	p := Plan{Seed: seed}
	for b := range blocks {
		for _, i := range r.Perm(len(arms)) {
			p.Runs = append(p.Runs, Planned{Arm: arms[i], Block: b})
		}
	}
	return p
}
