package oracle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/culprit-project/culprit/history"
)

// Schema judges ops whose reply must be JSON that satisfies a schema. It
// shares the classes InvalidJson and SchemaMismatch with [ToolCall]; which of
// the two was judged follows from the op.
var Schema = Oracle{
	Name:    "schema",
	Classes: []Class{InvalidJSON, SchemaMismatch},
	New: func(history.Header) Observer {
		return &schemaObserver{schemas: map[string]*jsonschema.Schema{}}
	},
}

type schemaObserver struct {
	schemas map[string]*jsonschema.Schema // by their bytes; nil for an unusable one
}

func (o *schemaObserver) Op(v *View, rec *Recorder) {
	raw := v.Op.Expect.Schema
	// A reply cut at the token limit is unfinished JSON by our own doing.
	if len(raw) == 0 || !v.Complete() || v.Reply.FinishReason == "length" {
		return
	}
	schema, ok := o.schemas[string(raw)]
	if !ok {
		schema, _ = compileSchema(raw)
		o.schemas[string(raw)] = schema
	}
	if schema == nil {
		return
	}
	rec.Trial(v.Op.ID, Schema.Classes...)
	broken := func(c Class, note string) {
		rec.Violation(Violation{Class: c, Op: v.Op.ID, Want: "JSON that satisfies " + string(raw), Got: shownReply(v.Reply), Note: note})
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(unfenced(v.Reply.Content)))
	if err != nil {
		broken(InvalidJSON, err.Error())
		return
	}
	if note := mismatch(schema, value); note != "" {
		broken(SchemaMismatch, note)
	}
}

func (o *schemaObserver) Event(*history.Event, *Recorder) {}

func (o *schemaObserver) Finish(*Recorder) {}

// unfenced takes a Markdown fence off a text that is nothing but a fenced
// block: a model's manner where the server doesn't enforce the schema.
func unfenced(text string) string {
	s := strings.TrimSpace(text)
	body, fenced := strings.CutPrefix(s, "```")
	body, closed := strings.CutSuffix(body, "```")
	if !fenced || !closed {
		return s
	}
	return strings.TrimPrefix(body, "json")
}

// compileSchema compiles a JSON Schema that stands by itself.
func compileSchema(raw json.RawMessage) (*jsonschema.Schema, error) {
	if len(raw) == 0 {
		return nil, errors.New("compile schema: it is empty")
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("compile schema: %w", err)
	}
	const location = "schema.json"
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{})
	if err := c.AddResource(location, doc); err != nil {
		return nil, fmt.Errorf("compile schema: %w", err)
	}
	s, err := c.Compile(location)
	if err != nil {
		return nil, fmt.Errorf("compile schema: %w", err)
	}
	return s, nil
}

// noLoader keeps schemas from naming files and addresses: a verdict depends on
// the history alone.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("load %s: a schema must stand by itself", url)
}

// mismatch says what a schema refuses in a value; "" when nothing.
func mismatch(schema *jsonschema.Schema, value any) string {
	if schema == nil {
		return ""
	}
	err := schema.Validate(value)
	if err == nil {
		return ""
	}
	// The first line names the schema, which says nothing here.
	_, causes, _ := strings.Cut(err.Error(), "\n")
	return strings.ReplaceAll(strings.TrimPrefix(causes, "- "), "\n- ", "; ")
}
