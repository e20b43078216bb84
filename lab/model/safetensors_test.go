package model

import (
	"encoding/binary"
	"encoding/json"
	"strings"
	"testing"
)

// withHeader replaces a safetensors file's header.
func withHeader(tb testing.TB, file []byte, edit func(header map[string]map[string]any)) []byte {
	tb.Helper()
	n := binary.LittleEndian.Uint64(file)
	var header map[string]map[string]any
	if err := json.Unmarshal(file[8:8+n], &header); err != nil {
		tb.Fatal(err)
	}
	edit(header)
	text, err := json.Marshal(header)
	if err != nil {
		tb.Fatal(err)
	}
	edited := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(edited, text...), file[8+n:]...)
}

func TestLoadErrors(t *testing.T) {
	file, _ := randomWeights(1, 5)
	edit := func(f func(header map[string]map[string]any)) []byte { return withHeader(t, file, f) }
	for _, test := range []struct {
		name, want string
		file       []byte
	}{
		{"empty", "0 bytes are too few", nil},
		{"header cut", "the header says", file[:100]},
		{"header length", "the header says 18446744073709551615 bytes", append([]byte("\xff\xff\xff\xff\xff\xff\xff\xff"), file[8:]...)},
		{"no JSON", "header: invalid character", append([]byte("\x03\x00\x00\x00\x00\x00\x00\x00"), "abcdef"...)},
		{"cut", `tensor "head": its bytes`, file[:len(file)-1]},
		{"nothing", `tensor "embed.0": missing (and`, []byte("\x02\x00\x00\x00\x00\x00\x00\x00{}")},
		{"missing", `weights: tensor "layers.2.mlp.up": missing`, edit(func(h map[string]map[string]any) { delete(h, "layers.2.mlp.up") })},
		{"unknown", `tensor "extra": the model has none`, edit(func(h map[string]map[string]any) { h["extra"] = h["norm"] })},
		{"shape", `tensor "layers.0.attn.kv": its shape is [192 128], want [128 192]`, edit(func(h map[string]map[string]any) {
			h["layers.0.attn.kv"]["shape"] = []int{192, 128}
		})},
		{"vocabulary", `tensor "embed.0": its shape is [5 191], want [V 192]`, edit(func(h map[string]map[string]any) {
			h["embed.0"]["shape"] = []int{5, 191}
		})},
		{"two vocabularies", `tensor "head": its shape is [4 192], want [5 192]`, edit(func(h map[string]map[string]any) {
			h["head"]["shape"] = []int{4, 192}
		})},
		{"dtype", `its dtype is "F64"`, edit(func(h map[string]map[string]any) { h["norm"]["dtype"] = "F64" })},
		{"negative offset", `its bytes -4 to`, edit(func(h map[string]map[string]any) { h["norm"]["data_offsets"] = []int{-4, 764} })},
		{"offsets reversed", `tensor "norm": its bytes`, edit(func(h map[string]map[string]any) { h["norm"]["data_offsets"] = []int{800, 32} })},
		{"offset type", `tensor "norm": json`, edit(func(h map[string]map[string]any) { h["norm"]["data_offsets"] = "0" })},
		{"huge", `is larger than the file`, edit(func(h map[string]map[string]any) { h["embed.0"]["shape"] = []int64{1 << 60, 192} })},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := Load(test.file); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
	if m, err := Load(file); err != nil || m.Vocab != 5 {
		t.Errorf("the file itself: %+v, %v", m, err)
	}
}

func FuzzSafetensors(f *testing.F) {
	const data = "0123456789abcdef0123456789abcdef"
	f.Add(`{"a":{"dtype":"F16","shape":[2,4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}`, data)
	f.Add(`{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,9223372036854775807]}}`, data)
	f.Add(`{"a":{"dtype":"BF16","shape":[4,4],"data_offsets":[-8,24]},"b":{"shape":[]}}`, data)
	f.Add(`{"__metadata__":null,"a":null,"b":{"shape":[0,4]}}`, "")
	f.Fuzz(func(t *testing.T, header, data string) {
		file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
		tensors, err := parseSafetensors(append(append(file, header...), data...))
		if err != nil {
			return
		}
		a, b := tensors.take("a", 0, 4), tensors.take("b", 8)
		if len(a)%4 != 0 || 2*len(a) > len(data) || (b != nil && len(b) != 8) {
			t.Errorf("%d and %d values from %d bytes", len(a), len(b), len(data))
		}
		if err := tensors.finish(); (a == nil || b == nil) && err == nil {
			t.Error("a tensor is missing, and no error")
		}
	})
}
