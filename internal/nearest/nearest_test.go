package nearest

import "testing"

func TestName(t *testing.T) {
	tests := []struct {
		name, typed string
		candidates  []string
		want        string
	}{
		{"a slip", "concurency", []string{"sessions", "concurrency"}, "concurrency"},
		{"the first of several", "ac", []string{"ad", "ab"}, "ad"},
		{"none", "x", nil, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := Name(tt.typed, tt.candidates); got != tt.want {
				t.Errorf("nearest to %q: %q, want %q", tt.typed, got, tt.want)
			}
		})
	}
}
