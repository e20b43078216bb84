package workload

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"testing"
)

// marshal writes all that a server would see of some turns, and all that is
// expected of it.
func marshal(t *testing.T, turns []Turn) string {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	for _, turn := range turns {
		if err := e.Encode(turn); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

func golden(t *testing.T, turns []Turn) string {
	t.Helper()
	sum := sha256.Sum256([]byte(marshal(t, turns)))
	return hex.EncodeToString(sum[:8])
}
