package app

import "testing"

// A command that can't take --resume names the one that can.
func TestHuntResumedBy(t *testing.T) {
	tests := []struct {
		name string
		o    HuntOptions
		want string
	}{
		{"a user's case", HuntOptions{Seed: 2}, "the same command with --resume"},
		{"its own case", HuntOptions{Made: true}, "culprit hunt --resume 'a demo'"},
		{"and settings", HuntOptions{Made: true, Seed: 2, MinRate: 0.02}, "culprit hunt --resume 'a demo' --seed 2 --min-rate 0.02"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.o.resumedBy("a demo"); got != tt.want {
				t.Errorf("%q goes on, want %q", got, tt.want)
			}
		})
	}
}
