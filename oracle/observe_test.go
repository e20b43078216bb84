package oracle

import (
	"slices"

	"github.com/culprit-project/culprit/history"
)

// observe shows views and events to oracles, in the order in which they end,
// and returns what was found, by class and then by severity.
func observe(header history.Header, views []*View, events []history.Event, oracles ...Oracle) []Violation {
	rec := newRecorder()
	for _, v := range views {
		rec.add(v)
	}
	for _, oracle := range oracles {
		rec.oracle = &oracle
		observer := oracle.New(header)
		i := 0
		for _, v := range views {
			for ; i < len(events) && events[i].At <= v.Op.LastByte; i++ {
				observer.Event(&events[i], rec)
			}
			observer.Op(v, rec)
		}
		for ; i < len(events); i++ {
			observer.Event(&events[i], rec)
		}
		observer.Finish(rec)
	}
	var found []Violation
	for _, class := range rec.classes {
		for _, e := range slices.Concat(class.worst[mainArm], class.worst[controlArm]) {
			found = append(found, Violation{Class: class.rule.Class, Op: e.Op, Want: e.Want, Got: e.Got, Note: e.Note, Severity: e.severity})
		}
	}
	return found
}

func judgeOne(v *View, oracles ...Oracle) []Violation {
	return observe(history.Header{}, []*View{v}, nil, oracles...)
}
