package target

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"time"

	"github.com/culprit-project/culprit/history"
)

// linesKey is the value of a log event that says how many lines matched.
const linesKey = "lines"

// Follower reads the logs of a server as they grow and counts the lines that
// match patterns.
type Follower struct {
	Files    []string
	Patterns map[string]*regexp.Regexp
	Every    time.Duration // 0 is a second
	Start    time.Time     // the history's time 0
	Emit     func(*history.Event) error
}

// lineLimit bounds what is matched of one line; a longer one is matched in
// pieces.
const lineLimit = 64 << 10

// Run follows from where the files end now until ctx ends, and then takes what
// is there. Each second in which lines matched a pattern is one event, with
// their number and the first of them. A file that isn't there yet is waited
// for; one that became shorter is read from its start.
func (f *Follower) Run(ctx context.Context) error {
	every := f.Every
	if every == 0 {
		every = time.Second
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	logs := make([]followed, len(f.Files))
	for i, path := range f.Files {
		logs[i].path = path
		if info, err := os.Stat(path); err == nil {
			logs[i].at = info.Size()
		}
	}
	for last := false; !last; {
		select {
		case <-ctx.Done():
			last = true
		case <-tick.C:
		}
		counts, first := map[string]float64{}, map[string]string{}
		for i := range logs {
			if err := logs[i].read(last, func(line []byte) { f.match(line, counts, first) }); err != nil {
				return fmt.Errorf("follow logs: %w", err)
			}
		}
		for _, name := range sortedKeys(counts) {
			err := f.Emit(&history.Event{
				At: time.Since(f.Start), Kind: history.Log, Name: name, Text: first[name],
				Values: map[string]float64{linesKey: counts[name]},
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func sortedKeys(m map[string]float64) []string {
	var keys []string
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

func (f *Follower) match(line []byte, counts map[string]float64, first map[string]string) {
	for name, pattern := range f.Patterns {
		if !pattern.Match(line) {
			continue
		}
		if counts[name]++; counts[name] == 1 {
			first[name] = clip(Redact(string(line)))
		}
	}
}

// followed is a file that grows.
type followed struct {
	path   string
	at     int64
	before []byte // a line without its end
}

// read calls for each line that was completed since the last time, and at last
// for one that wasn't.
func (l *followed) read(last bool, line func([]byte)) error {
	f, err := os.Open(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() < l.at {
		l.at, l.before = 0, nil
	}
	if _, err := f.Seek(l.at, io.SeekStart); err != nil {
		return err
	}
	buffer := make([]byte, lineLimit)
	for {
		n, err := f.Read(buffer)
		l.at += int64(n)
		l.before = append(l.before, buffer[:n]...)
		for {
			end := bytes.IndexByte(l.before, '\n')
			if end < 0 {
				break
			}
			line(l.before[:end])
			l.before = l.before[end+1:]
		}
		if len(l.before) >= lineLimit {
			line(l.before)
			l.before = nil
		}
		l.before = bytes.Clone(l.before)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if last && len(l.before) > 0 {
		line(l.before)
		l.before = nil
	}
	return nil
}
