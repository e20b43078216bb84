package target

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// Redacted stands where a secret was.
const Redacted = "[redacted]"

// Words of names. A name is cut into words at signs and at capitals:
// HF_TOKEN, --api-key, clientSecret.
var (
	secretWords = []string{"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "accesskey"}
	// A name that ends so is secret, unless the word before says what kind of
	// token or key it is: eos_token, cache_key.
	secretEnds = []string{"key", "keys", "token", "auth", "authorization", "cookie", "pass", "pat", "jwt", "signature"}
	plainEnds  = []string{
		"bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "think", "stop", "start", "end", "image", "video", "audio", "tool", "per", "next", "first", "last", "max", "min",
		"sort", "primary", "foreign", "cache", "extra", "hash", "routing", "public", "index", "prefix", "no", "disable", "enable",
	}
)

// secretName reports whether what goes by a name is a secret.
func secretName(name string) bool {
	words := wordsOf(name)
	for i, w := range words {
		if slices.Contains(secretWords, w) || w == "key" && i > 0 && slices.Contains([]string{"api", "access", "private"}, words[i-1]) {
			return true
		}
	}
	last := len(words) - 1
	return last >= 0 && slices.Contains(secretEnds, words[last]) && (last == 0 || !slices.Contains(plainEnds, words[last-1]))
}

func wordsOf(name string) []string {
	var words []string
	var word []rune
	flush := func() {
		if len(word) > 0 {
			words = append(words, strings.ToLower(string(word)))
			word = word[:0]
		}
	}
	lower := false
	for _, r := range name {
		letter := unicode.IsLetter(r) || unicode.IsDigit(r)
		if !letter || unicode.IsUpper(r) && lower {
			flush()
		}
		if letter {
			word = append(word, r)
		}
		lower = unicode.IsLower(r)
	}
	flush()
	return words
}

// mayBeSecret leaves alone what no secret looks like: a switch, a small number.
var plainValue = regexp.MustCompile(`^(?i:true|false|on|off|yes|no|none|null|auto|-?[0-9]{0,3}(\.[0-9]+)?)$`)

// RedactNamed redacts a value whose name says that it is secret, or that has a
// secret's shape.
func RedactNamed(name, value string) string {
	if secretName(name) && !plainValue.MatchString(value) {
		return Redacted
	}
	return Redact(value)
}

var (
	secretShapes = regexp.MustCompile(`\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abeprs]-[A-Za-z0-9-]{10,}|\bnvapi-[\w-]{16,}|\bAIza[\w-]{30,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bS[ACNOUX][A-Z2-7]{56}\b|\beyJ[\w-]{8,}\.eyJ[\w-]*\.[\w-]*|(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$))`)
	bearer       = regexp.MustCompile(`(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}`)
	userInfo     = regexp.MustCompile(`(\b[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/\s:@]*:[^/\s@]+|[^/\s:@]{12,})@`)
	named        = regexp.MustCompile(`(?i)((?:[?&][\w-]*(?:token|key|sig|signature)=)|(?:[\w-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|[_-]token)["']?\s*[:=]\s*["']?))([^\s"',;&]{8,})`)
	longRun      = regexp.MustCompile(`[A-Za-z0-9+/_-]{40,}={0,2}`)
)

// Redact takes out of a text what has a secret's shape: keys of known kinds,
// tokens, a URL's password, long random runs.
func Redact(text string) string {
	text = secretShapes.ReplaceAllString(text, Redacted)
	text = bearer.ReplaceAllString(text, "${1}"+Redacted)
	text = userInfo.ReplaceAllString(text, "${1}"+Redacted+"@")
	text = named.ReplaceAllString(text, "${1}"+Redacted)
	return longRun.ReplaceAllStringFunc(text, func(run string) string {
		if random(run) {
			return Redacted
		}
		return run
	})
}

// random tells base64 of random bytes from paths and model names: of its
// neighbours that are letters or digits, six in ten are of different classes
// (capital, small, digit), where words and numbers change class rarely. It
// looks at the parts between slashes first, since a path has random parts too
// (a commit, a digest) that are no secrets: those are hexadecimal.
func random(run string) bool {
	const enough = 0.5
	pairs, changes, last := 0, 0, 0
	seen := [4]bool{}
	for _, r := range run {
		class := 0
		switch {
		case r >= 'A' && r <= 'Z':
			class = 1
		case r >= 'a' && r <= 'z':
			class = 2
		case r >= '0' && r <= '9':
			class = 3
		}
		if class != 0 && last != 0 {
			pairs++
			if class != last {
				changes++
			}
		}
		seen[class], last = true, class
	}
	return seen[1] && seen[2] && seen[3] && float64(changes) >= enough*float64(pairs)
}

// redactArgs redacts a command line: values after a flag with a secret's name,
// NAME=VALUE, JSON, and shapes anywhere.
func redactArgs(args []string) []string {
	out := make([]string, len(args))
	secret := false // what follows is a secret flag's value
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		flag := strings.HasPrefix(arg, "-") && len(arg) > 1
		switch {
		case secret && !flag && !plainValue.MatchString(arg):
			out[i] = Redacted
		case flag && joined, !flag && joined && !strings.ContainsAny(name, " {:/"):
			out[i] = name + "=" + redactText(name, value)
			secret = false
		case flag:
			out[i] = Redact(arg)
			secret = secretName(arg)
		default:
			out[i] = redactText("", arg)
		}
	}
	return out
}

// redactText redacts a value that may be JSON.
func redactText(name, value string) string {
	if trimmed := strings.TrimSpace(value); strings.HasPrefix(trimmed, "{") || strings.HasPrefix(trimmed, "[") {
		if b, err := redactJSON([]byte(value)); err == nil && json.Valid([]byte(value)) {
			return string(b)
		}
	}
	return RedactNamed(name, value)
}

// redactJSON redacts a JSON value and gives it in canonical form: keys sorted,
// no spaces.
func redactJSON(b []byte) (json.RawMessage, error) {
	value, err := decodeJSON(b)
	if err != nil {
		return nil, err
	}
	return encodeJSON(redactValue("", value))
}

func redactValue(name string, value any) any {
	switch v := value.(type) {
	case map[string]any:
		for key, member := range v {
			v[key] = redactValue(key, member)
		}
	case []any:
		for i, member := range v {
			v[i] = redactValue(name, member)
		}
	case string:
		if name == "media_marker" {
			return v // llama.cpp draws it at each start: random, and no secret
		}
		return RedactNamed(name, v)
	}
	return value
}
