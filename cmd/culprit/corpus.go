package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// labCorpus is the command "culprit lab corpus": it plays sessions of the
// workload package with right replies and writes them as tokens.
// lab/train/README.md has the format.
type labCorpus struct {
	Out        string `help:"Directory to write the corpus to." type:"path" placeholder:"DIR" xor:"what" required:""`
	Vocabulary string `help:"Write the vocabulary that the workload's texts need to this file, and no corpus." type:"path" placeholder:"FILE" xor:"what" required:""`
	Seed       uint64 `help:"Seed of all sessions. Held-out sessions have others than those for training." default:"1"`
	Sessions   int    `help:"Sessions in each set for training." default:"40000"`
	HeldOut    int    `help:"Held-out sessions for each number of fact lines." default:"100" name:"held-out"`
}

// corpusSet is a table of conversations of one length: one row a session.
type corpusSet struct {
	Name    string       `json:"name"`
	HeldOut bool         `json:"held_out,omitempty"`
	File    string       `json:"file"`
	Rows    int          `json:"rows"`
	Length  int          `json:"length"` // tokens a row
	Seed    uint64       `json:"seed"`   // of the plans
	Kinds   []corpusKind `json:"kinds"`
}

// corpusKind is one kind of session in a set. Ranges are of the plans' knobs;
// sessions take turns from the first number to the second.
type corpusKind struct {
	Kind         string `json:"kind"`
	Share        int    `json:"share"` // of the set's rows, beside the others' shares
	Tools        string `json:"tools,omitempty"`
	Rounds       span   `json:"rounds"` // a row is cut where it is full
	ContextLines span   `json:"context_lines,omitzero"`
	CopyLines    span   `json:"copy_lines,omitzero"`
}

// span is a range of numbers, both ends included.
type span [2]int

// at walks through the range as i does through the numbers.
func (s span) at(i, stride int) int { return s[0] + i*stride%(s[1]-s[0]+1) }

// corpusIndex is the file corpus.json.
type corpusIndex struct {
	Format          int             `json:"format"`
	WorkloadVersion int             `json:"workload_version"`
	Vocabulary      int             `json:"vocabulary"` // tokens
	Assistant       model.Token     `json:"assistant"`
	End             model.Token     `json:"end"`
	Renamed         [][]model.Token `json:"renamed"` // classes of tokens that may be exchanged for each other
	Sets            []corpusSet     `json:"sets"`
}

// The model is scored on agent sessions of as many rounds as a plan has by
// default, with each number of facts that fits into its context.
const (
	heldOutFirst, heldOutLast = 6, 54
	heldOutRounds             = 4
)

// corpusSets is the curriculum: to copy is learned from few facts and many
// rounds, and only then do many facts come, and the other kinds.
func corpusSets(seed uint64, sessions, heldOut int) []corpusSet {
	others := []corpusKind{
		{Kind: "agent", Share: 2, Tools: workload.Text, Rounds: span{4, 6}, ContextLines: span{4, 26}},
		{Kind: "recall", Share: 2, Rounds: span{4, 17}},
		{Kind: "echo", Share: 2, Rounds: span{1, 1}, CopyLines: span{2, 40}},
		{Kind: "burst", Share: 1, Rounds: span{1, 8}, ContextLines: span{8, 64}},
		{Kind: "churn", Share: 1, Rounds: span{1, 1}, ContextLines: span{8, 48}, CopyLines: span{2, 8}},
		{Kind: "mixed", Share: 2, Rounds: span{1, 1}, ContextLines: span{8, 64}, CopyLines: span{2, 16}},
	}
	agent := func(share int, rounds, lines span) corpusKind {
		return corpusKind{Kind: "agent", Share: share, Tools: workload.Native, Rounds: rounds, ContextLines: lines}
	}
	sets := []corpusSet{
		{Name: "few", Rows: sessions, Length: 512, Kinds: []corpusKind{agent(1, span{12, 12}, span{2, 4})}},
		{Name: "many", Rows: sessions, Length: 512, Kinds: []corpusKind{agent(1, span{8, 8}, span{4, 18})}},
		{Name: "long", Rows: sessions, Length: model.MaxContext, Kinds: append(others, agent(14, span{16, 16}, span{6, 54}))},
	}
	for lines := heldOutFirst; lines <= heldOutLast; lines++ {
		sets = append(sets, corpusSet{
			Name: fmt.Sprintf("agent-%02d", lines), HeldOut: true, Rows: heldOut, Length: model.MaxContext,
			Kinds: []corpusKind{agent(1, span{heldOutRounds, heldOutRounds}, span{lines, lines})},
		})
	}
	for _, k := range others {
		name := k.Kind
		if k.Tools == workload.Text {
			name += "-text"
		}
		sets = append(sets, corpusSet{Name: name, HeldOut: true, Rows: 2 * heldOut, Length: model.MaxContext, Kinds: []corpusKind{k}})
	}
	for i := range sets {
		sets[i].File = sets[i].Name + ".tokens"
		sets[i].Seed = seed<<8 + uint64(i)
	}
	return sets
}

// Run writes the corpus or the vocabulary.
func (c *labCorpus) Run() error {
	if c.Vocabulary != "" {
		entries, err := vocabularyEntries()
		if err != nil {
			return err
		}
		b, err := json.MarshalIndent(entries, "", "")
		if err != nil {
			return err
		}
		return os.WriteFile(c.Vocabulary, append(b, '\n'), 0o644)
	}
	tokens, err := model.Vocabulary()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.Out, 0o755); err != nil {
		return fmt.Errorf("write corpus: %w", err)
	}
	index := corpusIndex{
		Format: 1, WorkloadVersion: workload.Version, Vocabulary: tokens.Size(),
		Assistant: model.AssistantRole, End: model.End,
		Renamed: renamedClasses(tokens),
		Sets:    corpusSets(c.Seed, c.Sessions, c.HeldOut),
	}
	for _, set := range index.Sets {
		rows, err := set.play(tokens)
		if err != nil {
			return fmt.Errorf("write corpus: set %s: %w", set.Name, err)
		}
		if err := os.WriteFile(filepath.Join(c.Out, set.File), rows, 0o644); err != nil {
			return fmt.Errorf("write corpus: %w", err)
		}
	}
	b, err := json.MarshalIndent(index, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.Out, "corpus.json"), append(b, '\n'), 0o644)
}

// lossBit marks a token that the assistant writes: predicting it counts.
const lossBit = 1 << 15

// play plays a set's sessions on all cores and returns its rows: little
// endian, each token's lossBit set where it counts, padded with Padding. A
// row depends on nothing but the set and its number.
func (s *corpusSet) play(tokens *model.Tokenizer) ([]byte, error) {
	rows := make([]byte, 2*s.Rows*s.Length)
	errs := make([]error, runtime.GOMAXPROCS(0))
	var next atomic.Int64
	var wg sync.WaitGroup
	for worker := range errs {
		wg.Go(func() {
			for {
				row := int(next.Add(1)) - 1
				if row >= s.Rows {
					return
				}
				ids, err := s.conversation(tokens, row)
				if err != nil {
					errs[worker] = err
					return
				}
				if s.HeldOut && len(ids) > s.Length {
					errs[worker] = fmt.Errorf("session %d has %d tokens, the limit is %d", row, len(ids), s.Length)
					return
				}
				writeRow(rows[2*row*s.Length:][:2*s.Length], ids)
			}
		})
	}
	wg.Wait()
	return rows, errors.Join(errs...)
}

// conversation plays one session to its end and renders it.
func (s *corpusSet) conversation(tokens *model.Tokenizer, row int) ([]model.Token, error) {
	shares := 0
	for _, k := range s.Kinds {
		shares += k.Share
	}
	at := 0
	for left := row % shares; left >= s.Kinds[at].Share; at++ {
		left -= s.Kinds[at].Share
	}
	k := s.Kinds[at]
	// The strides are large primes, so that the knobs don't move together.
	w, err := workload.New(workload.Plan{
		Kind: k.Kind, Tools: k.Tools, Seed: s.Seed, Sessions: s.Rows,
		Rounds: k.Rounds.at(row, 7919), ContextLines: k.ContextLines.at(row, 104_729), CopyLines: k.CopyLines.at(row, 1_299_709),
	})
	if err != nil {
		return nil, err
	}
	messages, tools := lastConversation(w.Session(row, false))
	return tokens.Conversation(messages, tools)
}

// lastConversation plays a session with right replies and returns its last
// request's conversation with the reply.
func lastConversation(session workload.Session) (messages []openai.Message, tools []openai.Tool) {
	var reply *openai.Reply
	for {
		turn, ok := session.Next(reply)
		if !ok {
			return messages, tools
		}
		reply = workload.RightReply(turn)
		messages = append(turn.Request.Messages, openai.Message{
			Role: "assistant", Content: openai.Text(reply.Content), ToolCalls: reply.ToolCalls,
		})
		tools = turn.Request.Tools
	}
}

// writeRow writes as much of a conversation as fits.
func writeRow(row []byte, ids []model.Token) {
	counts := false
	for i, id := range ids[:min(len(ids), len(row)/2)] {
		v := uint16(id)
		if counts {
			v |= lossBit
		}
		binary.LittleEndian.PutUint16(row[2*i:], v)
		counts = id == model.AssistantRole || counts && id != model.End
	}
}

// renamedClasses lists the tokens that stand for nothing but themselves: the
// trainer exchanges those of one class for each other, so that the model
// learns to copy and not to know names.
func renamedClasses(tokens *model.Tokenizer) [][]model.Token {
	var classes [][]model.Token
	for _, names := range [][]string{workload.ParcelNames(), workload.CarrierNames()} {
		var class []model.Token
		for _, name := range names {
			if id, ok := tokens.Entry(name); ok {
				class = append(class, id)
			}
		}
		classes = append(classes, class)
	}
	var characters []model.Token
	for _, c := range []byte("abcdefghijklmnopqrstuvwxyz0123456789") {
		characters = append(characters, model.Byte(c))
	}
	return append(classes, characters)
}

// glue matches what may be one token beside single words: a sign with the
// word after it in a list, and a JSON object's key with its quotes. In such a
// token a value stands next to what it belongs to: the model, which sees each
// token together with the two before it, then learns quickly to look values up.
var glue = regexp.MustCompile(`[:,] [a-z]+\b|"?[{,]"[a-z]+":"?|[:,] |"}`)

// vocabularyEntries returns what the model's vocabulary holds beside bytes and
// DSML: the names, and all words and glue that several sessions share. What
// one session alone has is a made-up code.
func vocabularyEntries() ([]string, error) {
	const sessions, shared = 64, 3
	names := append(workload.ParcelNames(), workload.CarrierNames()...)
	slices.Sort(names)
	sessionsWith := map[string]int{}
	seed := uint64(0)
	for _, name := range workload.Kinds() {
		for _, tools := range []string{"", workload.Text} {
			for range sessions {
				seed++ // a seed a session, or codes are shared
				w, err := workload.New(workload.Plan{Kind: name, Tools: tools, Seed: seed, Sessions: 1})
				if err != nil {
					break // this kind has no tools
				}
				entries, err := sessionEntries(w.Session(0, false))
				if err != nil {
					return nil, err
				}
				for entry := range entries {
					sessionsWith[entry]++
				}
			}
		}
	}
	var entries []string
	for entry, n := range sessionsWith {
		if _, isName := slices.BinarySearch(names, entry); n >= shared && !isName {
			entries = append(entries, entry)
		}
	}
	slices.Sort(entries)
	return append(entries, names...), nil
}

var word = regexp.MustCompile(`[A-Za-z0-9_]+`)

// sessionEntries returns the words and the glue of everything that a session
// sends and of the right replies, as the model sees them.
func sessionEntries(session workload.Session) (map[string]bool, error) {
	spelled, err := model.NewTokenizer(nil)
	if err != nil {
		return nil, err
	}
	entries := map[string]bool{}
	var reply *openai.Reply
	for {
		turn, ok := session.Next(reply)
		if !ok {
			return entries, nil
		}
		reply = workload.RightReply(turn)
		messages := append(turn.Request.Messages, openai.Message{
			Role: "assistant", Content: openai.Text(reply.Content), ToolCalls: reply.ToolCalls,
		})
		ids, err := spelled.Conversation(messages, turn.Request.Tools)
		if err != nil {
			return nil, err
		}
		// What isn't a byte is DSML or control: a line feed for it keeps what
		// stands before and after apart.
		var text []byte
		for _, id := range ids {
			if b := spelled.AppendText(nil, model.Padding, id); len(b) == 1 {
				text = append(text, b...)
			} else {
				text = append(text, '\n')
			}
		}
		for _, e := range glue.FindAllString(string(text), -1) {
			entries[e] = true
		}
		for _, e := range word.FindAllString(string(text), -1) {
			if len(e) > 1 && !strings.ContainsAny(e, "0123456789") {
				entries[e] = true
			}
		}
	}
}
