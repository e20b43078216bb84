package oracle

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

func TestFoundIdentifiers(t *testing.T) {
	const (
		uuid  = "3f0c2a7e-91d4-4b1e-8a55-0c6d2f7b9e10"
		order = "ORD-2291-AZKQ-8813"
	)
	op := func(id int64, session int, sent, end time.Duration, request, reply string) *View {
		body, err := json.Marshal(map[string]string{"content": request})
		if err != nil {
			t.Fatal(err)
		}
		return &View{
			Op:    &history.Op{ID: id, Phase: history.Main, Session: session, Sent: sent, LastByte: end, Outcome: history.OK, Request: body},
			Reply: &openai.Reply{Content: reply, FinishReason: "stop"},
		}
	}
	tests := []struct {
		name string
		ops  []*View
		want []int64 // leaking ops
	}{
		{"own", []*View{op(1, 0, 0, 5, "my order\n"+order, "so "+order+", right?")}, nil},
		{"another conversation's", []*View{op(1, 0, 0, 5, "key "+uuid, "ok"), op(2, 1, 6, 9, "hello", "your key is "+uuid+".")}, []int64{2}},
		{"another's that is still running", []*View{op(2, 1, 6, 9, "hello", "your key is "+uuid+"."), op(1, 0, 0, 12, "key "+uuid, "ok")}, []int64{2}},
		{"one that the reply made up and the next agent was given", []*View{op(1, 0, 0, 5, "make a key", uuid), op(2, 1, 6, 9, "use "+uuid, "done")}, nil},
		{"one that the same conversation goes on with", []*View{op(1, 0, 0, 5, "make a key", uuid), op(2, 0, 6, 9, "use "+uuid, "done "+uuid)}, nil},
		{"one that several sent", []*View{op(1, 0, 0, 5, uuid, "ok"), op(2, 1, 0, 5, uuid, "ok"), op(3, 2, 6, 9, "hello", uuid)}, nil},
		{"words, dates, versions", []*View{op(1, 0, 0, 5, "2026-11-29T16-57-19 internationalisation v1.2.3", "ok"), op(2, 1, 6, 9, "hi", "2026-11-29T16-57-19 internationalisation")}, nil},
		{"after an escape", []*View{op(1, 0, 0, 5, "a\n"+order, "ok"), op(2, 1, 6, 9, "hi", order)}, []int64{2}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []int64
			for _, v := range observe(history.Header{}, tt.ops, nil, Canary) {
				got = append(got, v.Op)
			}
			slices.Sort(got)
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("leaking ops (-want +got):\n%s", d)
			}
		})
	}
}
