package history

import (
	"encoding/binary"
	"math/bits"
)

// maxDepth bounds the nesting of JSON in a record: a reader's stack is bounded
// on hostile input, and jq before 1.7 refuses a line nested deeper than 256.
const maxDepth = 200

// valueEnd returns the index after the JSON value (RFC 8259) that starts at
// b[i], or -1 when there is none or it is nested deeper than depth. It doesn't
// look whether strings are valid UTF-8.
//
// The same function decides on writing what may be embedded and on reading
// where it ends, so the two can't disagree.
func valueEnd(b []byte, i, depth int) int {
	if i >= len(b) {
		return -1
	}
	switch c := b[i]; {
	case c == '"':
		return stringEnd(b, i+1)
	case c == '{' && depth > 0:
		return objectEnd(b, i+1, depth-1)
	case c == '[' && depth > 0:
		return arrayEnd(b, i+1, depth-1)
	case c == '-' || '0' <= c && c <= '9':
		return numberEnd(b, i)
	case c == 't':
		return wordEnd(b, i, "true")
	case c == 'f':
		return wordEnd(b, i, "false")
	case c == 'n':
		return wordEnd(b, i, "null")
	}
	return -1
}

func objectEnd(b []byte, i, depth int) int {
	i = skipSpace(b, i)
	if i < len(b) && b[i] == '}' {
		return i + 1
	}
	for i < len(b) && b[i] == '"' {
		i = stringEnd(b, i+1)
		if i < 0 {
			return -1
		}
		i = skipSpace(b, i)
		if i >= len(b) || b[i] != ':' {
			return -1
		}
		i = valueEnd(b, skipSpace(b, i+1), depth)
		if i < 0 {
			return -1
		}
		i = skipSpace(b, i)
		if i < len(b) && b[i] == '}' {
			return i + 1
		}
		if i >= len(b) || b[i] != ',' {
			return -1
		}
		i = skipSpace(b, i+1)
	}
	return -1
}

func arrayEnd(b []byte, i, depth int) int {
	i = skipSpace(b, i)
	if i < len(b) && b[i] == ']' {
		return i + 1
	}
	for {
		i = valueEnd(b, i, depth)
		if i < 0 {
			return -1
		}
		i = skipSpace(b, i)
		if i < len(b) && b[i] == ']' {
			return i + 1
		}
		if i >= len(b) || b[i] != ',' {
			return -1
		}
		i = skipSpace(b, i+1)
	}
}

// stringEnd returns the index after the closing quote of the string whose
// first character is b[i].
func stringEnd(b []byte, i int) int {
	for {
		i = plainEnd(b, i)
		if i >= len(b) || b[i] < ' ' {
			return -1
		}
		if b[i] == '"' {
			return i + 1
		}
		// A backslash.
		if i+1 >= len(b) {
			return -1
		}
		switch b[i+1] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			i += 2
		case 'u':
			if _, ok := hex4(b, i+2); !ok {
				return -1
			}
			i += 6
		default:
			return -1
		}
	}
}

// plainEnd returns the index of the first byte at or after i that is a quote,
// a backslash or a control character, len(b) when there is none.
//
// Eight bytes at a time: (w-1) &^ w & 0x80 marks a byte that is zero, and no
// wrong byte below the first right one, which is the one that is asked for.
func plainEnd(b []byte, i int) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	for ; i+8 <= len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		quote := w ^ ones*'"'
		slash := w ^ ones*'\\'
		m := ((quote-ones)&^quote | (slash-ones)&^slash | (w-ones*' ')&^w) & highs
		if m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
	}
	for ; i < len(b); i++ {
		if c := b[i]; c == '"' || c == '\\' || c < ' ' {
			return i
		}
	}
	return len(b)
}

func numberEnd(b []byte, i int) int {
	if b[i] == '-' {
		i++
	}
	if i < len(b) && b[i] == '0' {
		i++
	} else if i = digitsEnd(b, i); i < 0 {
		return -1
	}
	if i < len(b) && b[i] == '.' {
		if i = digitsEnd(b, i+1); i < 0 {
			return -1
		}
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		return digitsEnd(b, i)
	}
	return i
}

// digitsEnd wants at least one digit.
func digitsEnd(b []byte, i int) int {
	start := i
	for i < len(b) && '0' <= b[i] && b[i] <= '9' {
		i++
	}
	if i == start {
		return -1
	}
	return i
}

func wordEnd(b []byte, i int, word string) int {
	end := i + len(word)
	if end > len(b) || string(b[i:end]) != word {
		return -1
	}
	return end
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && isSpace(b[i]) {
		i++
	}
	return i
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

// hex4 reads the four hexadecimal digits at b[i].
func hex4(b []byte, i int) (r rune, ok bool) {
	if i+4 > len(b) {
		return 0, false
	}
	for _, c := range b[i : i+4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			c = (c | 0x20) - 'a' + 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}
