package lab

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
)

// sample chooses a token. A draw depends on the logits, the seed and how many
// tokens the reply has, so that it is the same in any batch.
func sample(logits []float32, temperature, topP float64, seed, position uint64) int32 {
	if temperature == 0 {
		return argmax(logits)
	}
	order := ranked(logits)
	weights := make([]float64, len(order))
	most := float64(logits[order[0]])
	var sum float64
	for i, id := range order {
		weights[i] = math.Exp((float64(logits[id]) - most) / temperature)
		sum += weights[i]
	}
	if topP > 0 && topP < 1 {
		var nucleus float64
		for i := range order {
			nucleus += weights[i]
			if nucleus >= topP*sum {
				order, sum = order[:i+1], nucleus
				break
			}
		}
	}
	at := rand.New(rand.NewPCG(seed, position)).Float64() * sum
	for i, id := range order {
		if at -= weights[i]; at < 0 {
			return id
		}
	}
	return order[0] // weights that aren't numbers, or rounding
}

// argmax is the lowest id of the largest logit.
func argmax(logits []float32) int32 {
	best := 0
	for id, v := range logits {
		if v > logits[best] {
			best = id
		}
	}
	return int32(best)
}

// ranked lists all ids, likeliest first, the lower first where two are equal.
func ranked(logits []float32) []int32 {
	ids := make([]int32, len(logits))
	for id := range ids {
		ids[id] = int32(id)
	}
	slices.SortStableFunc(ids, func(a, b int32) int { return cmp.Compare(logits[b], logits[a]) })
	return ids
}

// logprobs returns a token's log-probability and those of the likeliest ones.
func logprobs(logits []float32, id int32, top int) (float64, []Logprob) {
	most := float64(logits[argmax(logits)])
	var sum float64
	for _, v := range logits {
		sum += math.Exp(float64(v) - most)
	}
	of := func(id int32) float64 { return float64(logits[id]) - most - math.Log(sum) }
	if top == 0 {
		return of(id), nil
	}
	list := make([]Logprob, min(top, len(logits)))
	for i, id := range ranked(logits)[:len(list)] {
		list[i] = Logprob{id, of(id)}
	}
	return of(id), list
}
