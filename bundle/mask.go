package bundle

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode"

	"github.com/culprit-project/culprit/history"
)

// mask replaces the text of an op by text of the same shape. The keys, numbers
// and structure of its JSON stay, and so do values that say how, not what.
func mask(op *history.Op) {
	op.Request = maskJSON(op.Request)
	for i := range op.Chunks {
		op.Chunks[i].Data = maskJSON(op.Chunks[i].Data)
	}
	op.Expect = history.Expect{}
}

// plain are the keys whose text is the protocol's.
var plain = map[string]bool{
	"role": true, "type": true, "object": true, "model": true, "finish_reason": true, "id": true, "tool_call_id": true,
	"stop_reason": true, "system_fingerprint": true,
}

func maskJSON(data []byte) []byte {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var value any
	if err := d.Decode(&value); err != nil || d.More() {
		if string(bytes.TrimSpace(data)) == "[DONE]" {
			return data
		}
		return []byte(maskText(string(data)))
	}
	out, err := json.Marshal(maskValue("", value))
	if err != nil {
		return []byte(maskText(string(data)))
	}
	return out
}

func maskValue(key string, value any) any {
	switch v := value.(type) {
	case map[string]any:
		for k := range v {
			v[k] = maskValue(k, v[k])
		}
	case []any:
		for i := range v {
			v[i] = maskValue(key, v[i])
		}
	case string:
		if !plain[key] {
			return maskText(v)
		}
	}
	return value
}

// maskText keeps length, case, spaces and signs.
func maskText(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsUpper(r):
			return 'X'
		case unicode.IsLetter(r):
			return 'x'
		case unicode.IsNumber(r):
			return '0'
		case r > unicode.MaxASCII:
			return '?'
		}
		return r
	}, text)
}
