package term

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mattn/go-runewidth"
	"pgregory.net/rapid"
)

func TestSafe(t *testing.T) {
	tests := []struct{ name, in, want string }{
		{"plain", "ship mara", "ship mara"},
		{"escape sequence", "a\x1b[2Jb", `a\x1b[2Jb`},
		{"line ends", "a\r\nb\tc", `a\r\nb\tc`},
		{"invalid utf-8", "a\xffb", `a\xffb`},
		{"direction override", "a\u202eb", `a\u202eb`},
		{"C1 control", "a\u009bb", `a\x9bb`},
		{"wide and accented", "größe 漢字 😀", "größe 漢字 😀"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := Safe(tt.in); got != tt.want {
				t.Errorf("Safe(%q) = %q, want %q", tt.in, got, tt.want)
			}
		})
	}
}

func TestSafeHoldsNoControl(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Safe(string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")))
		for _, r := range s {
			if r < 0x20 || r == 0x7f || (r >= 0x80 && r < 0xa0) {
				t.Fatalf("control %q in %q", r, s)
			}
		}
	})
}

func TestWrapFits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringOf(rapid.RuneFrom([]rune("ab 漢 "))).Draw(t, "text")
		columns := rapid.IntRange(2, 20).Draw(t, "columns")
		lines := Wrap(text, columns)
		for _, l := range lines {
			if runewidth.StringWidth(l) > columns {
				t.Fatalf("line %q is wider than %d", l, columns)
			}
		}
		if got, want := strings.Join(lines, ""), strings.Join(strings.Fields(text), ""); strings.ReplaceAll(got, " ", "") != want {
			t.Fatalf("Wrap lost text: %q, want %q", got, want)
		}
	})
}

func TestTable(t *testing.T) {
	s := NewScreen(nil)
	got := s.Table("lr", [][]string{{"oracle", "ops"}, {"漢字", "7"}, {"WrongArgument", "120"}})
	want := "" +
		"  oracle         ops\n" +
		"  漢字             7\n" +
		"  WrongArgument  120\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestProgress(t *testing.T) {
	var b bytes.Buffer
	s := NewScreen(&b)
	s.Live = true
	s.Progress("one")
	s.Progress("two")
	s.Printf("end\n")
	if want := "one\r\x1b[Ktwo\r\x1b[Kend\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.0 ms", 5400 * time.Microsecond: "5.4 ms", 77 * time.Millisecond: "77 ms", 77800 * time.Millisecond: "77.8 s",
		2 * time.Minute: "120 s", 750 * time.Second: "12.5 min", 200 * time.Minute: "3.3 h",
	} {
		if got := Duration(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}
