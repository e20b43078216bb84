package lab

import (
	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/lab/sched"
)

// damage is what faults have left behind.
type damage struct {
	poisoned bool           // the forward pass's: a number that is none has reached what all requests share
	repeated model.Token    // what that makes of every token
	worn     map[int32]bool // pages that nothing can be written to any more
}

// wear is what the fault slow-decay does at a request's end.
func (d *damage) wear(page int32) {
	if d.worn == nil {
		d.worn = map[int32]bool{}
	}
	d.worn[page] = true
}

// look notes what expressions may ask about between two steps.
func (r *rank) look() {
	if r.config.Faults == nil {
		return
	}
	*r.between = r.env
	r.between.Tier, r.between.Batch = tierNone, r.sched.Running()
	r.between.Cancels, r.between.Requests, r.between.Uptime = r.cancels, int(r.number), r.steps
}

// strikes asks for a fault between two steps, as if so many requests were in a
// step.
func (r *rank) strikes(f fault.Fault, batch int) bool {
	if !r.config.Faults.Has(f) {
		return false
	}
	env := *r.between
	env.Batch = batch
	return r.config.Faults.On(f, &env)
}

// moment is what the faults' expressions may ask about a step.
func (r *rank) moment(step *sched.Step) fault.Env {
	env := r.env
	if r.config.Faults == nil {
		return env
	}
	env.Batch, env.Cancels, env.Requests, env.Uptime = len(step.Items), r.cancels, int(r.number), r.steps
	env.Tier = tierNone
	for _, item := range step.Items {
		switch q := item.Request; {
		case q.HostTokens > 0:
			env.Tier = tierHost
			return env
		case q.CachedTokens > 0:
			env.Tier = tierDevice
		}
	}
	return env
}

// Values of fault.Env's Tier.
const (
	tierNone   = "none"
	tierDevice = "device"
	tierHost   = "host"
)

// Strikes asks for a fault that isn't the engine's own, at a request that has
// just ended. Any goroutine may call it.
func (e *Engine) Strikes(f fault.Fault, u Usage) bool {
	if !e.config.Faults.Has(f) {
		return false
	}
	env := e.env
	switch {
	case u.Host > 0:
		env.Tier = tierHost
	case u.Device > 0:
		env.Tier = tierDevice
	default:
		env.Tier = tierNone
	}
	s := e.Stats()
	env.Batch = s.Running + 1 // the request itself doesn't run any more
	env.Cancels = int(s.Ended[Cancelled] + s.Ended[Aborted])
	env.Requests = s.Running + s.Waiting
	for _, n := range s.Ended {
		env.Requests += int(n)
	}
	env.Uptime = int(s.PrefillSteps + s.DecodeSteps)
	return e.config.Faults.On(f, &env)
}
