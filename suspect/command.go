package suspect

import (
	"slices"
	"strings"
)

// word is an argument of a command, or the place of a factor.
type word struct {
	text   string
	factor string // {{factor}}, after text
	value  bool   // the factor is the value of the flag before it
}

// spelled is how a flag is compared: engines take _ for - in long flags.
func spelled(flag string) string {
	if !strings.HasPrefix(flag, "--") {
		return flag
	}
	head, rest, dotted := strings.Cut(flag, ".")
	head = strings.ReplaceAll(head, "_", "-")
	if dotted {
		return head + "." + rest
	}
	return head
}

func isFlag(arg string) bool {
	return len(arg) > 1 && arg[0] == '-' && strings.Trim(arg, "-0123456789.") != ""
}

// occurrence is where a flag is in a command: words[at:end], with its value.
type occurrence struct {
	at, end int
	flag    string // as it is written
	value   string
	joined  bool // --flag=value
}

// find lists a flag's places. One that the table writes with "=" at its end
// takes a value; a name with a value of its own, as in "--x.y=NONE", is met
// with that value alone.
func find(words []word, flag string) []occurrence {
	name, wanted, assigned := strings.Cut(flag, "=")
	var all []occurrence
	for i, w := range words {
		head, value, joined := strings.Cut(w.text, "=")
		if w.factor != "" || !isFlag(w.text) || spelled(head) != spelled(name) {
			continue
		}
		o := occurrence{i, i + 1, head, value, joined}
		if assigned && !joined && i+1 < len(words) && words[i+1].factor == "" && !isFlag(words[i+1].text) {
			o.end, o.value = i+2, words[i+1].text
		}
		if wanted == "" || wanted == o.value {
			all = append(all, o)
		}
	}
	return all
}

func findAny(words []word, flags []string) []occurrence {
	var all []occurrence
	for _, f := range flags {
		all = append(all, find(words, f)...)
	}
	slices.SortFunc(all, func(a, b occurrence) int { return a.at - b.at })
	return all
}

// take removes flags and puts a factor in the place of the first, or at the
// end. It returns what it removed.
func take(words []word, places []occurrence, factor string) (rest []word, taken []string) {
	gone := map[int]bool{}
	for _, o := range places {
		for i := o.at; i < o.end; i++ {
			gone[i] = true
		}
	}
	placed := false
	for i, w := range words {
		if !gone[i] {
			rest = append(rest, w)
			continue
		}
		taken = append(taken, w.text)
		if !placed {
			rest, placed = append(rest, word{factor: factor}), true
		}
	}
	if !placed {
		rest = append(rest, word{factor: factor})
	}
	return rest, taken
}
