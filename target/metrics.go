package target

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/vm"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/nearest"
)

// ParseMetrics reads Prometheus' text format: values by series, a series being
// a name and its labels, sorted: requests_total{model="m",rank="0"}. What isn't
// a number that JSON has (NaN, an infinity) is left out. It is of our own,
// since a library for these lines brings protocol buffers with it.
//
// https://prometheus.io/docs/instrumenting/exposition_formats/
func ParseMetrics(b []byte) (map[string]float64, error) {
	values := map[string]float64{}
	number := 0
	for line := range strings.Lines(string(b)) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		series, value, err := parseSample(line)
		if err != nil {
			return nil, fmt.Errorf("metrics, line %d: %w", number, err)
		}
		if !math.IsNaN(value) && !math.IsInf(value, 0) {
			values[series] = value
		}
	}
	return values, nil
}

// parseSample reads "name{label="value",...} value [time]".
func parseSample(line string) (series string, value float64, err error) {
	end := strings.IndexAny(line, "{ \t")
	if end <= 0 {
		return "", 0, fmt.Errorf("%.80q has no name and value", line)
	}
	name, rest := line[:end], strings.TrimLeft(line[end:], " \t")
	series = name
	if strings.HasPrefix(rest, "{") {
		var labels []string
		if labels, rest, err = parseLabels(rest[1:]); err != nil {
			return "", 0, fmt.Errorf("%.80q: %w", line, err)
		}
		slices.Sort(labels)
		if len(labels) > 0 {
			series += "{" + strings.Join(labels, ",") + "}"
		}
	}
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return "", 0, fmt.Errorf("%.80q has no value", line)
	}
	if value, err = strconv.ParseFloat(fields[0], 64); err != nil && !errors.Is(err, strconv.ErrRange) {
		return "", 0, fmt.Errorf("%.80q: the value %.40q is no number", line, fields[0])
	}
	return series, value, nil
}

// parseLabels reads up to the closing brace.
func parseLabels(text string) (labels []string, rest string, err error) {
	for {
		text = strings.TrimLeft(text, ", \t")
		if strings.HasPrefix(text, "}") {
			return labels, text[1:], nil
		}
		eq := strings.IndexByte(text, '=')
		if eq < 0 || len(text) < eq+2 || text[eq+1] != '"' {
			return nil, "", errors.New("a label isn't NAME=\"VALUE\"")
		}
		end := eq + 2
		for end < len(text) && text[end] != '"' {
			if text[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(text) {
			return nil, "", errors.New("a label's value doesn't end")
		}
		labels = append(labels, strings.TrimSpace(text[:eq])+text[eq:end+1])
		text = text[end+1:]
	}
}

// dull series say nothing of the server's work, or too much: the buckets of
// histograms.
func dull(series string) bool {
	name, _, _ := strings.Cut(series, "{")
	return strings.HasSuffix(name, "_bucket") || strings.HasSuffix(name, "_created") ||
		slices.ContainsFunc([]string{"python_", "process_", "go_", "promhttp_"}, func(p string) bool { return strings.HasPrefix(name, p) })
}

// Scraper reads a server's metrics as it works and puts them into a history.
type Scraper struct {
	Server *Server
	Path   string        // empty is /metrics
	Every  time.Duration // 0 is a second
	Start  time.Time     // the history's time 0
	Emit   func(*history.Event) error
}

const (
	scrapeTimeout     = 5 * time.Second
	lastScrapeTimeout = time.Second
)

// Run scrapes until ctx ends, and once more then: what happened since the last
// tick counts too, and a short run has nothing else. The first event has all
// series, each later one those that changed. A scrape that fails is an event
// with the reason, the first time in a row; a server without metrics is one
// such event.
func (s *Scraper) Run(ctx context.Context) error {
	every, path := s.Every, s.Path
	if every == 0 {
		every = time.Second
	}
	if path == "" {
		path = "/metrics"
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	last, failed := map[string]float64{}, false
	once := func(ctx context.Context) (gone bool, err error) {
		values, err := s.scrape(ctx, path)
		if ctx.Err() != nil {
			return false, nil
		}
		event := &history.Event{At: time.Since(s.Start), Kind: history.Metrics, Name: path}
		switch {
		case err != nil && !failed:
			failed, event.Text = true, Redact(err.Error())
		case err == nil:
			failed, event.Values = false, changes(last, values)
		}
		status, ok := errors.AsType[*statusError](err)
		gone = ok && status.code == http.StatusNotFound
		if event.Text == "" && len(event.Values) == 0 {
			return gone, nil
		}
		return gone, s.Emit(event)
	}
	for {
		if gone, err := once(ctx); gone || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastScrapeTimeout)
			defer cancel()
			_, err := once(ctx)
			return err
		case <-tick.C:
		}
	}
}

// changes lists the values that aren't in last and puts them there.
func changes(last, values map[string]float64) map[string]float64 {
	changed := map[string]float64{}
	for series, value := range values {
		if old, known := last[series]; !dull(series) && (!known || old != value) {
			changed[series], last[series] = value, value
		}
	}
	return changed
}

func (s *Scraper) scrape(ctx context.Context, path string) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Server.BaseURL+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	body, _, err := s.Server.do(req)
	if err != nil {
		return nil, err
	}
	return ParseMetrics(body)
}

// Movement is what metrics, probes and log counts did over a run. The zero value has
// seen nothing.
type Movement struct {
	last   map[string]float64 // by series
	values map[string]float64 // by name
	lines  map[string]float64 // of logs, by pattern
}

// Add takes an event of the history; those of other kinds don't count.
func (m *Movement) Add(e *history.Event) {
	if m.last == nil {
		m.last, m.values, m.lines = map[string]float64{}, map[string]float64{}, map[string]float64{}
	}
	switch e.Kind {
	case history.Log:
		if n, ok := e.Values[linesKey]; ok {
			m.lines[e.Name] += n
		}
	case history.Probe:
		// A probe's counts begin with the run. Its labels' are in its own.
		for name, value := range e.Values {
			if !strings.ContainsAny(name, "{:") {
				m.values["probe:"+name+"_total"] = value
			}
		}
	case history.Metrics:
		for series, value := range e.Values {
			m.sample(series, value)
		}
		for name, value := range m.gauges() {
			if old, seen := m.values[name]; !seen || value > old {
				m.values[name] = value
			}
		}
	default:
	}
}

func (m *Movement) sample(series string, value float64) {
	name, _, _ := strings.Cut(series, "{")
	old, seen := m.last[series]
	m.last[series] = value
	switch {
	case !counter(name):
	case !seen: // the run begins here
		m.values[name] += 0
	case value >= old:
		m.values[name] += value - old
	default: // it began anew
		m.values[name] += value
	}
}

// gauges are the present sums over the labels.
func (m *Movement) gauges() map[string]float64 {
	sums := map[string]float64{}
	for series, value := range m.last {
		if name, _, _ := strings.Cut(series, "{"); !counter(name) {
			sums[name] += value
		}
	}
	return sums
}

// counter goes by the names that Prometheus asks for.
func counter(name string) bool {
	return strings.HasSuffix(name, "_total") || strings.HasSuffix(name, "_count") || strings.HasSuffix(name, "_sum")
}

// Values are the increases of counters and the highest values of gauges, both
// summed over labels, by the names that expressions use: sglang:x_total is
// sglang_x_total, x_total and x, as far as one metric alone has that name.
func (m *Movement) Values() map[string]float64 {
	values, owners := map[string]float64{}, map[string]int{}
	for name, value := range m.values {
		full := identifier(name)
		short := identifier(strings.TrimPrefix(name[strings.IndexByte(name, ':')+1:], "culprit_lab_"))
		for _, alias := range unique([]string{full, short, strings.TrimSuffix(short, "_total"), strings.TrimSuffix(full, "_total")}) {
			if _, taken := m.values[alias]; taken && alias != full {
				continue // that is another's own name
			}
			owners[alias]++
			values[alias] = value
		}
	}
	maps.DeleteFunc(values, func(alias string, _ float64) bool { return owners[alias] > 1 })
	return values
}

// identifier writes a metric's name as expressions can.
func identifier(name string) string {
	return strings.Map(func(r rune) rune {
		if r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '_'
	}, name)
}

// Requirement is an expression about what happened in a run, which must hold or
// the arm wasn't exercised: graph_replays > 0, logs.wedge == 0. A metric is
// its increase, or its highest value: see [Movement.Values].
type Requirement struct {
	text    string
	tree    ast.Node
	program *vm.Program
}

// CompileRequirement reads an expression. Which metrics there are is known only
// when the server runs.
func CompileRequirement(text string) (*Requirement, error) {
	tree, err := parseExpression(text)
	if err != nil {
		return nil, err
	}
	program, err := expr.Compile(text, expr.AllowUndefinedVariables(), expr.AsBool())
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", text, err)
	}
	return &Requirement{text, tree, program}, nil
}

// String is the expression.
func (r *Requirement) String() string { return r.text }

// Met reports whether what is required happened. When it didn't, why says what
// did; an error says that it can't be told.
func (r *Requirement) Met(m *Movement) (ok bool, why string, err error) {
	values := m.Values()
	env, lines := map[string]any{}, map[string]any{}
	for name, value := range values {
		env[name] = value
	}
	for name, n := range m.lines {
		lines[name] = n
	}
	env["logs"] = lines
	var met []string
	for _, name := range namesIn(r.tree) {
		value, known := env[name]
		switch {
		case name == "logs":
			continue
		case !known && len(values) == 0:
			return false, "", fmt.Errorf("require %#q: the server showed no metrics", r.text)
		case !known:
			return false, "", fmt.Errorf("require %#q: there is no metric %q; nearest: %q", r.text, name, nearest.Name(name, slices.Sorted(maps.Keys(values))))
		}
		met = append(met, fmt.Sprintf("%s is %g", name, value))
	}
	for _, chain := range membersIn(r.tree) {
		name := chain.last()
		if chain.parent().String() != "logs" {
			continue
		}
		if _, seen := lines[name]; !seen {
			lines[name] = 0.0 // no line matched
		}
		met = append(met, fmt.Sprintf("%s is %v", chain, lines[name]))
	}
	result, err := expr.Run(r.program, env)
	if err != nil {
		return false, "", fmt.Errorf("require %#q: %w", r.text, err)
	}
	if ok, _ = result.(bool); ok {
		return true, "", nil
	}
	return false, fmt.Sprintf("%#q doesn't hold: %s", r.text, strings.Join(met, ", ")), nil
}
