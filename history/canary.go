package history

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"
)

// CanaryLength is the length of a canary in characters: 12 of base 32 are 60
// bits, so that a chance match in a run's text is out of the question.
const CanaryLength = 12

// Canary is the secret of one session: HMAC-SHA256 of the session's number
// under the run's key, in lower-case base 32. It follows from the number
// alone, so whoever knows the key recognises every session's canary without
// having seen the session. A control session has another than the session
// whose content it shares.
func Canary(runKey []byte, session int, alone bool) string {
	mac := hmac.New(sha256.New, runKey)
	fmt.Fprintf(mac, "session %d alone %t", session, alone)
	return strings.ToLower(base32.StdEncoding.EncodeToString(mac.Sum(nil)))[:CanaryLength]
}
