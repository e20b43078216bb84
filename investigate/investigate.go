// Package investigate asks several investigators about a case at once: agent
// programs, or models with tools that can only read. What they answer are
// claims, with the places in the source that they rest on; each place is checked
// against the source that is deployed. docs/investigators.md describes what they
// are told and what they answer.
//
// Stability: may change.
package investigate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Investigator looks into a case. Investigate returns its answer as it came, and
// what it had said when it was cut short.
type Investigator interface {
	Name() string
	Investigate(ctx context.Context, brief string) (answer []byte, err error)
}

// Claim is what an investigator says.
type Claim struct {
	Name        string   `json:"name"` // a few words
	Statement   string   `json:"statement"`
	Places      []Place  `json:"places"`
	Predictions []string `json:"predictions"`
}

// Place is somewhere in the source.
type Place struct {
	File   string `json:"file"` // as the sources are named: PACKAGE/PATH
	Line   int    `json:"line"` // from 1
	Text   string `json:"text,omitempty"`
	SHA256 string `json:"sha256,omitempty"` // of the file, or its first digits
	// Wrong says why the place isn't in the deployed source. It is set by the
	// check, whatever the investigator said.
	Wrong string `json:"wrong,omitempty"`
}

// Result is what came of one investigator.
type Result struct {
	Investigator string        `json:"investigator"`
	Claims       []Claim       `json:"claims"`
	Error        string        `json:"error,omitempty"` // it failed, or its answer couldn't be read
	Took         time.Duration `json:"-"`
}

// Options of [Run].
type Options struct {
	Timeout time.Duration // for each investigator
	Sources *Sources      // that places are checked against
}

// answerLimit is the most that is read of an answer.
const answerLimit = 4 << 20

// mostClaims is how many claims of one investigator are kept: a flood isn't an
// investigation.
const mostClaims = 20

// Run asks all investigators side by side. What one does, or doesn't, costs the
// others nothing.
func Run(ctx context.Context, all []Investigator, brief string, o Options) []Result {
	results := make([]Result, len(all))
	var wait sync.WaitGroup
	for i, who := range all {
		wait.Go(func() { results[i] = one(ctx, who, brief, o) })
	}
	wait.Wait()
	return results
}

func one(ctx context.Context, who Investigator, brief string, o Options) (r Result) {
	started := time.Now()
	r.Investigator = who.Name()
	defer func() {
		r.Took = time.Since(started)
		if p := recover(); p != nil {
			r.Error = fmt.Sprintf("it crashed: %v", p)
		}
	}()
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("it took more than %s", o.Timeout))
	defer cancel()
	answer, err := who.Investigate(ctx, brief)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		r.Error = err.Error()
	}
	claims, readErr := ReadClaims(answer)
	if readErr != nil && err == nil {
		r.Error = readErr.Error()
	}
	for i := range claims {
		for j := range claims[i].Places {
			p := &claims[i].Places[j]
			p.Wrong = o.Sources.Check(*p)
		}
	}
	r.Claims = claims
	return r
}

// ReadClaims reads an answer: a JSON object with "claims", which may stand in
// other text. Of several the last one counts.
func ReadClaims(answer []byte) ([]Claim, error) {
	if len(bytes.TrimSpace(answer)) == 0 {
		return nil, errors.New("it answered nothing")
	}
	tried := 0
	for at := len(answer) - 1; at >= 0 && tried < mostObjects; at-- {
		if answer[at] != '{' || !begins(answer, at) {
			continue
		}
		tried++
		var object struct {
			Claims *[]Claim `json:"claims"`
		}
		if err := json.NewDecoder(bytes.NewReader(answer[at:])).Decode(&object); err != nil || object.Claims == nil {
			continue
		}
		claims := *object.Claims
		claims = slices.DeleteFunc(claims, func(c Claim) bool { return strings.TrimSpace(c.Statement) == "" })
		return claims[:min(len(claims), mostClaims)], nil
	}
	lines := strings.Split(strings.TrimSpace(string(answer)), "\n")
	return nil, fmt.Errorf(`its answer has no JSON object with "claims"; it ends in %.80q`, lines[len(lines)-1])
}

// begins reports whether an object at a place may be the answer.
func begins(answer []byte, at int) bool {
	return at == 0 || answer[at-1] == '\n' || bytes.HasPrefix(bytes.TrimLeft(answer[at+1:], " \t\r\n"), []byte(`"claims"`))
}

// mostObjects is how many places of an answer are tried.
const mostObjects = 1000
