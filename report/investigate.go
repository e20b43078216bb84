package report

import (
	"fmt"
	"time"

	"github.com/culprit-project/culprit/internal/term"
)

// Investigator is what came of one.
type Investigator struct {
	Name   string        `json:"name"`
	Error  string        `json:"error,omitempty"`
	Claims []Claim       `json:"claims"`
	Took   time.Duration `json:"-"`
}

// Claim is what an investigator said, and whether it became a hypothesis.
type Claim struct {
	Statement  string  `json:"statement"`
	Places     []Place `json:"places"`
	Hypothesis string  `json:"hypothesis,omitempty"`
	Not        string  `json:"not,omitempty"` // why it became none
}

// Place is where in the source a claim rests.
type Place struct {
	At    string `json:"at"`
	Wrong string `json:"wrong,omitempty"` // why it isn't in the deployed source
}

// Investigated shows what investigators said, and where they contradict each
// other. Everything that they said is theirs, so it is made safe.
func Investigated(s *term.Screen, all []Investigator, disputed [][2]string) {
	for i, who := range all {
		if i > 0 {
			s.Printf("\n")
		}
		s.Printf("%s  %d %s, %s\n", s.Paint(term.Safe(who.Name), term.Bold), len(who.Claims), plural(len(who.Claims), "claim", "claims"), term.Duration(who.Took))
		if who.Error != "" {
			paragraph(s, "  ", "  ", s.Paint("failed: "+term.Clip(term.Safe(who.Error), 4*s.Columns()), term.Yellow))
		}
		for _, c := range who.Claims {
			paragraph(s, "  - ", "    ", term.Safe(c.Statement))
			for _, p := range c.Places {
				mark := ": in the deployed source"
				if p.Wrong != "" {
					mark = ": NOT in the deployed source: " + p.Wrong
				}
				paragraph(s, "    ", "      ", s.Paint(term.Safe(p.At+mark), term.Faint))
			}
			if c.Hypothesis != "" {
				paragraph(s, "    ", "      ", "hypothesis "+term.Safe(c.Hypothesis))
			} else {
				paragraph(s, "    ", "      ", s.Paint("no hypothesis: "+term.Safe(firstLine(c.Not)), term.Yellow))
			}
		}
	}
	for i, pair := range disputed {
		if i == 0 {
			title(s, "They contradict each other")
		}
		s.Printf("%s", fmt.Sprintf("  %s and %s\n", term.Safe(pair[0]), term.Safe(pair[1])))
	}
}
