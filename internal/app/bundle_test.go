package app

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestShrunkWorkload: the youngest of what shrink left in a case is found, and
// nothing else that is called so.
func TestShrunkWorkload(t *testing.T) {
	dir := t.TempDir()
	at := time.Now().Add(-time.Hour)
	write := func(path string) string {
		t.Helper()
		path = filepath.Join(dir, filepath.FromSlash(path))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		at = at.Add(time.Minute)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		return path
	}
	places := []string{filepath.Join(dir, "*"), filepath.Join(dir, "runs", "*"), filepath.Join(dir, "[")}
	write("other/workload.yaml") // no result of shrink's
	if got := shrunkWorkload(places); got != "" {
		t.Errorf("found %s", got)
	}
	for _, name := range []string{"runs/0003-shrink", "small", "runs/0007-shrink"} {
		want := write(name + "/workload.yaml")
		write(name + "/shrink.json")
		if got := shrunkWorkload(places); got != want {
			t.Errorf("found %q, want %s", got, want)
		}
	}
}
