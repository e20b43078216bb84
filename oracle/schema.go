package oracle

import "github.com/culprit-project/culprit/history"

// SchemaBroken is a reply that should satisfy the request's JSON Schema and
// doesn't.
const SchemaBroken Class = "SchemaBroken"

// Schema judges ops that asked for JSON of a given schema.
var Schema = Oracle{
	Name:    "schema",
	Classes: []Class{SchemaBroken},
	New:     func(history.Header) Observer { return &schemaObserver{} },
}

type schemaObserver struct{}

func (o *schemaObserver) Op(*View, *Recorder)             {}
func (o *schemaObserver) Event(*history.Event, *Recorder) {}
func (o *schemaObserver) Finish(*Recorder)                {}
