package workload

import (
	"fmt"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// RightReply returns the perfect reply to a turn, so that a session can be
// played to its end without a server.
func RightReply(turn Turn) *openai.Reply {
	e := turn.Expect
	switch {
	case e.Call != nil:
		return rightCall(*e.Call, e.TextCall, len(turn.Request.Messages))
	case e.Copy != nil:
		return rightText(strings.Join(e.Copy, "\n"))
	case e.Schema != nil:
		return rightText(fmt.Sprintf(textCodeObject, e.Answer))
	case e.Answer != "":
		return rightText(e.Answer)
	default:
		return rightText("ok")
	}
}

// rightCall is the reply that makes a call, after that many messages.
func rightCall(call history.Call, text bool, messages int) *openai.Reply {
	if text {
		return rightText(fmt.Sprintf(textCallForm, call.Name, arguments(call)))
	}
	return &openai.Reply{
		ToolCalls: []openai.ToolCall{{
			ID: fmt.Sprintf("call_%d", messages), Type: "function",
			Function: openai.FunctionCall{Name: call.Name, Arguments: arguments(call)},
		}},
		FinishReason: "tool_calls", Done: true,
	}
}

func rightText(text string) *openai.Reply {
	return &openai.Reply{Content: text, FinishReason: "stop", Done: true}
}

var zero = 0.0

// turn makes a turn of a conversation, with what all requests have in common.
func (w *workload) turn(messages []openai.Message, expect history.Expect) Turn {
	seed := int64(w.plan.Seed & 0x7fffffff) // some servers take 31 bits
	return Turn{
		Request: openai.ChatRequest{
			Messages:    slices.Clone(messages),
			MaxTokens:   w.plan.MaxTokens,
			Temperature: &zero,
			Seed:        &seed,
			Logprobs:    w.plan.Logprobs,
			TopLogprobs: w.plan.TopLogprobs,
		},
		Expect: expect,
	}
}
