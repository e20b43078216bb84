package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/culprit-project/culprit/openai"
)

// Conversation renders messages and tools as the model is trained on them:
//
//	<begin>
//	<tools> NAME(PARAMETER PARAMETER)\n...      when there are tools
//	<system> TEXT | <user> TEXT | <tool> TEXT | <assistant> TEXT CALLS <end>
//
// A conversation's rendering begins with the rendering of its first messages,
// so that a longer conversation finds the shorter one's pages in the cache.
// Names of tools and parameters are all that is taken from the schemas; ids
// of calls and an assistant's reasoning are left out.
func (t *Tokenizer) Conversation(messages []openai.Message, tools []openai.Tool) ([]Token, error) {
	dst := []Token{Begin}
	if len(tools) > 0 {
		text, err := toolsText(tools)
		if err != nil {
			return nil, err
		}
		dst = t.AppendEncode(append(dst, ToolsRole), text)
	}
	for i := range messages {
		m := &messages[i]
		switch m.Role {
		case "system", "developer":
			dst = t.AppendEncode(append(dst, SystemRole), string(m.Content))
		case "user":
			dst = t.AppendEncode(append(dst, UserRole), string(m.Content))
		case "tool":
			dst = t.AppendEncode(append(dst, ToolRole), string(m.Content))
		case "assistant":
			dst = t.AppendEncode(append(dst, AssistantRole), AssistantText(m))
			dst = append(dst, End)
		default:
			return nil, fmt.Errorf("messages[%d]: role %q is not one of system, developer, user, assistant, tool", i, m.Role)
		}
	}
	return dst, nil
}

// Prompt is the conversation with the assistant's turn opened: what the model
// is given so that it replies.
func (t *Tokenizer) Prompt(messages []openai.Message, tools []openai.Tool) ([]Token, error) {
	dst, err := t.Conversation(messages, tools)
	if err != nil {
		return nil, err
	}
	return append(dst, AssistantRole), nil
}

// AssistantText is an assistant's turn as the model writes it: the content,
// then the calls in DSML (DeepSeek's markup for tool calls, with the wrapper
// tool_calls), two line feeds between them.
func AssistantText(m *openai.Message) string {
	if len(m.ToolCalls) == 0 {
		return string(m.Content)
	}
	var s strings.Builder
	if m.Content != "" {
		s.WriteString(string(m.Content))
		s.WriteString("\n\n")
	}
	s.WriteString(openCalls)
	for i := range m.ToolCalls {
		writeInvoke(&s, &m.ToolCalls[i].Function)
	}
	s.WriteString(closeCalls)
	return s.String()
}

// writeInvoke writes one call, its parameters in the order of the arguments'
// text. Arguments that aren't a JSON object are written as they are, which
// the markup allows.
func writeInvoke(s *strings.Builder, call *openai.FunctionCall) {
	s.WriteString(openInvoke)
	s.WriteString(call.Name)
	s.WriteString(endName)
	if arguments, err := members(call.Arguments); err == nil {
		for _, a := range arguments {
			s.WriteString(openParameter)
			s.WriteString(a.name)
			s.WriteString(a.end)
			s.WriteString(a.value)
			s.WriteString(closeParameter)
		}
	} else {
		s.WriteString(call.Arguments)
	}
	s.WriteString(closeInvoke)
}

type argument struct{ name, end, value string }

// members reads a JSON object in order: strings as their raw text, other
// values as compact JSON.
func members(object string) ([]argument, error) {
	fields, err := objectFields([]byte(object))
	if err != nil {
		return nil, err
	}
	arguments := make([]argument, 0, len(fields))
	for _, f := range fields {
		a := argument{name: f.name, end: endStringName}
		if f.value[0] == '"' {
			if err := json.Unmarshal(f.value, &a.value); err != nil {
				return nil, err
			}
		} else {
			var compact bytes.Buffer
			if err := json.Compact(&compact, f.value); err != nil {
				return nil, err
			}
			a.end, a.value = endJSONName, compact.String()
		}
		arguments = append(arguments, a)
	}
	return arguments, nil
}

type field struct {
	name  string
	value json.RawMessage
}

// objectFields splits a JSON object into its members, in order.
func objectFields(object []byte) ([]field, error) {
	if !json.Valid(object) {
		return nil, fmt.Errorf("not valid JSON: %.40q", object)
	}
	d := json.NewDecoder(bytes.NewReader(object))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return nil, fmt.Errorf("not a JSON object: %.40q", object)
	}
	var fields []field
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, err
		}
		f := field{name: name.(string)} // an object's member begins with a string, or Token fails
		if err := d.Decode(&f.value); err != nil {
			return nil, err
		}
		fields = append(fields, f)
	}
	return fields, nil
}

// toolsText lists the tools, one a line: NAME(PARAMETER PARAMETER).
func toolsText(tools []openai.Tool) (string, error) {
	var s strings.Builder
	for i := range tools {
		f := &tools[i].Function
		s.WriteString(f.Name)
		s.WriteString("(")
		names, err := parameterNames(f.Parameters)
		if err != nil {
			return "", fmt.Errorf("tools[%d].function.parameters: %w", i, err)
		}
		s.WriteString(strings.Join(names, " "))
		s.WriteString(")\n")
	}
	return s.String(), nil
}

// parameterNames returns the names under a JSON Schema's "properties", in
// order.
func parameterNames(schema json.RawMessage) ([]string, error) {
	if len(schema) == 0 || bytes.Equal(bytes.TrimSpace(schema), []byte("null")) {
		return nil, nil
	}
	var object struct {
		Properties json.RawMessage `json:"properties"`
	}
	if err := json.Unmarshal(schema, &object); err != nil {
		return nil, err
	}
	if len(object.Properties) == 0 || string(object.Properties) == "null" {
		return nil, nil
	}
	fields, err := objectFields(object.Properties)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
	}
	return names, nil
}
