package bundle

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/culprit-project/culprit/target"
)

const (
	around       = time.Minute // of logs, before and after a failure
	firstBroken  = 5
	tailLines    = 2000     // of a log whose lines have no times
	longestLine  = 64 << 10 // what is longer is cut
	longestLog   = 8 << 20  // of what goes into the bundle
	timesDiffer  = 5 * time.Minute
	biggestInput = 1 << 30
)

// logTime finds the time that a line begins with, or has near its beginning.
var logTime = regexp.MustCompile(`(\d{4})[-/](\d{2})[-/](\d{2})[T ](\d{2}:\d{2}:\d{2})`)

// logs copies what the server wrote around the first broken replies.
func (b *bundle) logs() error {
	var at []time.Time
	for _, id := range b.judged.Broken.Ops {
		at = append(at, b.header.Started.Add(b.ended[id]))
	}
	slices.SortFunc(at, time.Time.Compare)
	at = at[:min(len(at), firstBroken)]
	paths, err := filepath.Glob(filepath.Join(b.Run, "logs", "*.log"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		text, err := near(path, at)
		if err != nil {
			return err
		}
		if err := b.write(logsDir+"/"+filepath.Base(path), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// near takes a log's lines around some times; its last lines where no line has a
// time of the run.
func near(path string, at []time.Time) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > biggestInput {
		if _, err := f.Seek(-biggestInput, 2); err != nil {
			return nil, err
		}
	}
	var out bytes.Buffer
	var tail [][]byte
	keep, timed := false, false
	r := bufio.NewReaderSize(f, longestLine)
	for {
		line, more, err := r.ReadLine()
		if err != nil {
			break // a log's end, or what can be had of it
		}
		for more && err == nil {
			_, more, err = r.ReadLine()
		}
		if t, ok := timeOf(line); ok {
			keep = slices.ContainsFunc(at, func(a time.Time) bool { return t.Sub(a).Abs() <= around })
			timed = timed || keep || len(at) > 0 && t.Sub(at[0]).Abs() < timesDiffer
		}
		line = append([]byte(target.Redact(string(line))), '\n')
		if keep && out.Len() < longestLog {
			out.Write(line)
		}
		if tail = append(tail, line); len(tail) > 2*tailLines {
			tail = slices.Clone(tail[tailLines:])
		}
	}
	if !timed {
		return bytes.Join(tail[max(0, len(tail)-tailLines):], nil), nil
	}
	return out.Bytes(), nil
}

// timeOf reads a line's time, which is local where it doesn't say.
func timeOf(line []byte) (time.Time, bool) {
	m := logTime.FindSubmatch(line[:min(len(line), 120)])
	if m == nil {
		return time.Time{}, false
	}
	text := string(m[1]) + "-" + string(m[2]) + "-" + string(m[3]) + " " + string(m[4])
	t, err := time.ParseInLocation(time.DateTime, text, time.Local)
	return t, err == nil
}
