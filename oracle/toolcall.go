package oracle

import "github.com/culprit-project/culprit/history"

// Classes of a reply that should have been one known tool call. An op gets at
// most one: the first that applies, in this order.
const (
	DroppedCall    Class = "DroppedCall"    // no call where one was due
	MarkupLeak     Class = "MarkupLeak"     // call markup in text, name or arguments
	InvalidJSON    Class = "InvalidJson"    // arguments that aren't a JSON object
	UnknownName    Class = "UnknownName"    // a tool that the request doesn't have
	SchemaMismatch Class = "SchemaMismatch" // arguments that the tool's schema refuses
	WrongArgument  Class = "WrongArgument"  // a sound call, but not the right one
)

// ToolCall judges ops whose only right tool call is known.
var ToolCall = Oracle{
	Name:    "toolcall",
	Classes: []Class{DroppedCall, MarkupLeak, InvalidJSON, UnknownName, SchemaMismatch, WrongArgument},
	New:     func(history.Header) Observer { return &toolCallObserver{} },
}

type toolCallObserver struct{}

func (o *toolCallObserver) Op(*View, *Recorder)             {}
func (o *toolCallObserver) Event(*history.Event, *Recorder) {}
func (o *toolCallObserver) Finish(*Recorder)                {}
