package target

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTail(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"all of it", "a b\nc\n", "a b\nc\n"},
		{"whole lines", "key sk-12345678901234\nsecond\nthird\n", "third\n"},
		{"no lines", "key sk-12345678901234 90%\r91%", "90%\r91%"},
		{"nothing whole", strings.Repeat("x", 40), strings.Repeat("x", 13)},
		{"empty", "", ""},
	} {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, []byte(tt.text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := Tail(path, 13); err != nil || string(got) != tt.want {
			t.Errorf("%s: %q, %v, want %q", tt.name, got, err, tt.want)
		}
	}
	if _, err := Tail(filepath.Join(t.TempDir(), "none"), 13); err == nil {
		t.Error("a file that isn't there was read")
	}
}
