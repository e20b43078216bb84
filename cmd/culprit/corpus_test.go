package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// The lab's model knows the workload's texts by its vocabulary.
func TestVocabularyIsOfTheWorkload(t *testing.T) {
	want, err := vocabularyEntries()
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile("../../lab/model/weights/vocabulary.json")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	if err := json.Unmarshal(file, &got); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		missing := slices.DeleteFunc(want, func(e string) bool { return slices.Contains(got, e) })
		t.Errorf("the workload's texts changed since the lab's model was trained on them; it needs a new vocabulary and training: lab/train/README.md. New: %q", missing)
	}
}

// A reply's tokens are decoded, sent to a client, come back in the next
// request and are encoded: unless they are the same tokens then, the cache
// misses and the model reads what it never wrote.
func TestConversationsKeepTheirTokens(t *testing.T) {
	tokens, err := model.Vocabulary()
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range workload.Kinds() {
		for _, tools := range []string{"", workload.Text} {
			w, err := workload.New(workload.Plan{Kind: kind, Tools: tools, Seed: 7, Sessions: 4})
			if err != nil {
				continue // this kind has no tools
			}
			for i := range 4 {
				session := w.Session(i, false)
				var reply *openai.Reply
				var before []model.Token
				for {
					turn, ok := session.Next(reply)
					if !ok {
						break
					}
					reply = workload.RightReply(turn)
					prompt, err := tokens.Prompt(turn.Request.Messages, turn.Request.Tools)
					if err != nil {
						t.Fatal(err)
					}
					if kind == "agent" && !slices.Equal(prompt[:len(before)], before) {
						t.Fatalf("%s: a prompt doesn't begin with the last one and its reply", kind)
					}
					written := tokens.Encode(model.AssistantText(&openai.Message{
						Role: "assistant", Content: openai.Text(reply.Content), ToolCalls: reply.ToolCalls,
					}))
					if again := tokens.Encode(tokens.Decode(written)); !slices.Equal(again, written) {
						t.Fatalf("%s: the reply %q comes back as other tokens", kind, tokens.Decode(written))
					}
					before = append(append(prompt, written...), model.End)
				}
			}
		}
	}
}

func TestCorpus(t *testing.T) {
	read := func(seed uint64) (dir string, index corpusIndex) {
		dir = t.TempDir()
		if err := (&labCorpus{Out: dir, Seed: seed, Sessions: 20, HeldOut: 1}).Run(); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, "corpus.json"))
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &index); err != nil {
			t.Fatal(err)
		}
		return dir, index
	}
	dir, index := read(1)
	again, _ := read(1)
	other, _ := read(2)
	seeds := map[uint64]bool{}
	for _, set := range index.Sets {
		rows, err := os.ReadFile(filepath.Join(dir, set.File))
		if err != nil {
			t.Fatal(err)
		}
		if len(rows) != 2*set.Rows*set.Length {
			t.Errorf("%s has %d bytes for %d rows of %d tokens", set.Name, len(rows), set.Rows, set.Length)
		}
		if b, err := os.ReadFile(filepath.Join(again, set.File)); err != nil || !bytes.Equal(rows, b) {
			t.Errorf("%s differs between two runs with one seed, error %v", set.Name, err)
		}
		if b, err := os.ReadFile(filepath.Join(other, set.File)); err != nil || bytes.Equal(rows, b) {
			t.Errorf("%s is the same with another seed, error %v", set.Name, err)
		}
		if seeds[set.Seed] {
			t.Errorf("%s shares its seed with another set", set.Name)
		}
		seeds[set.Seed] = true
	}
}

// The tokens that count are those that the assistant writes.
func TestWriteRow(t *testing.T) {
	tokens, err := model.Vocabulary()
	if err != nil {
		t.Fatal(err)
	}
	ids, err := tokens.Conversation([]openai.Message{
		{Role: "user", Content: "ship it"}, {Role: "assistant", Content: "ok"}, {Role: "tool", Content: "true"},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	row := make([]byte, 2*(len(ids)+2))
	writeRow(row, ids)
	var counted, all []model.Token
	for i := 0; i < len(row); i += 2 {
		v := binary.LittleEndian.Uint16(row[i:])
		all = append(all, model.Token(v&^lossBit))
		if v&lossBit != 0 {
			counted = append(counted, model.Token(v&^lossBit))
		}
	}
	if want := append(slices.Clone(ids), model.Padding, model.Padding); !slices.Equal(all, want) {
		t.Errorf("the row has tokens %v, want %v", all, want)
	}
	if want := append(tokens.Encode("ok"), model.End); !slices.Equal(counted, want) {
		t.Errorf("tokens %v count, want %v", counted, want)
	}
	writeRow(row[:4], ids) // a longer conversation is cut
}

func TestRenamedClasses(t *testing.T) {
	tokens, err := model.Vocabulary()
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []int{len(workload.ParcelNames()), len(workload.CarrierNames()), len("abcdefghijklmnopqrstuvwxyz0123456789")} {
		class := renamedClasses(tokens)[i]
		if len(class) != want || strings.Contains(tokens.Decode(class), "parcel") {
			t.Errorf("class %d has %d tokens, want %d names", i, len(class), want)
		}
	}
}
