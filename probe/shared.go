package probe

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// WithoutAgent says which of some processes run Python and have no agent.
func (r *Reading) WithoutAgent(pids []int) []string {
	var without []int
	n := 0
	for _, pid := range pids {
		if _, err := interpreterOf(pid); err != nil {
			continue // no Python, or not ours to look at
		}
		if n++; !r.has(pid) {
			without = append(without, pid)
		}
	}
	var found []string
	for _, pid := range without {
		found = append(found, fmt.Sprintf("child PID %d started with -I/-E/-S or an empty environment: no agent there. Covered: %d of %d Python processes.", pid, n-len(without), n))
	}
	return found
}

// Shared says which processes have another's counter file mapped: Python's own
// fork gives a child a file of its own, native code's doesn't.
func (r *Reading) Shared() []string {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	dir, err := filepath.EvalSymlinks(r.Dir)
	if err != nil {
		return nil
	}
	var found []string
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		if err != nil || !bytes.Contains(maps, []byte(dir)) {
			continue
		}
		for i := range r.Processes {
			p := &r.Processes[i]
			if p.PID != pid && p.Alive && bytes.Contains(maps, []byte(filepath.Join(dir, p.name+".ctr"))) && !r.has(pid) {
				found = append(found, fmt.Sprintf("PID %d shares the counter file of PID %d (forked by native code). Counts of both are not summed.", pid, p.PID))
			}
		}
	}
	slices.Sort(found)
	return found
}

func (r *Reading) has(pid int) bool {
	return slices.ContainsFunc(r.Processes, func(p Process) bool { return p.PID == pid })
}
