package experiment

import (
	"strings"

	"github.com/culprit-project/culprit/design"
)

// FactorNote is what a case says of a factor for its readers; the search makes
// no use of it.
type FactorNote struct {
	Note string  // what the suspect level is, in words: "captured decode"
	Cost float64 // of the safe level, as a share of what the server does; 0 is not known
}

// LevelText is a level as a person would type it: the arguments that it adds to
// a command, or its text. A level that adds nothing is told by what it lacks.
func (c *Case) LevelText(factor, name string) string {
	if text := c.levels[factor][name].words(); text != "" {
		return text
	}
	for _, f := range c.Space.Factors {
		if f.Name != factor {
			continue
		}
		for _, other := range []int{f.Safe(), f.Failing()} {
			if f.Levels[other].Name == name {
				continue
			}
			if text := c.levels[factor][f.Levels[other].Name].words(); text != "" {
				return "no " + text
			}
		}
	}
	return name
}

func (l level) words() string { return strings.Join(l.text, " ") }

// Setting is a factor at a level as a person would type it: "index_k=bf16", or
// the arguments alone where they say it all.
func (c *Case) Setting(factor, name string) string {
	text := c.LevelText(factor, name)
	if strings.HasPrefix(text, "-") || strings.HasPrefix(text, "no -") {
		return text
	}
	return factor + "=" + text
}

// contains reports whether an arm has every level of a set, or one beyond it
// in a factor whose levels are in order.
func contains(space design.Space, arm, set design.Arm) bool {
	for _, f := range space.Factors {
		want, ok := set[f.Name]
		if !ok || arm[f.Name] == want {
			continue
		}
		has, least, safe := f.Level(arm[f.Name]), f.Level(want), f.Safe()
		if !f.Ordered || has < 0 || (has > least) != (least > safe) || has == safe {
			return false
		}
	}
	return true
}
