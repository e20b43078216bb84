package probe

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

var (
	fileLine = regexp.MustCompile(`^(\s*(?:- )?\s*)file:\s*([^\s#]+)`)
	sumLine  = regexp.MustCompile(`^\s*sha256:`)
)

// WriteHashes puts the SHA-256 of each probe's file into a pack's file, after
// the line that names the file, in place of one that is there. Comments and
// order stay.
func WriteHashes(path string, sums map[string]string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("write hashes: %w (a pack that comes with culprit can't be changed: copy it)", err)
	}
	var out []string
	for line := range strings.Lines(string(text)) {
		if sumLine.MatchString(line) {
			continue
		}
		out = append(out, line)
		if m := fileLine.FindStringSubmatch(line); m != nil {
			if sum := sums[m[2]]; sum != "" {
				out = append(out, fmt.Sprintf("%ssha256: %s\n", strings.Repeat(" ", len(m[1])), sum))
			}
		}
	}
	changed := strings.Join(out, "")
	if _, err := ParsePack(path, []byte(changed)); err != nil {
		return fmt.Errorf("write hashes: %s has its probes not in lines of file: ... that could be followed by sha256: %w", path, err)
	}
	return os.WriteFile(path, []byte(changed), 0o644)
}
