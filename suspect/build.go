package suspect

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/target"
)

// Server is a live server, as it was read.
type Server struct {
	BaseURL   string
	Live      *target.Attestation
	Processes []Process // in the order in which they start; none: nothing says how it is started
}

// Process is one process of it. What it runs with is in the attestation, by
// its name.
type Process struct {
	Name      string
	Host      string // reached by ssh; empty is this machine
	URL       string // its own, beside the base URL
	Container bool   // it has a file system of its own
}

// Options is what a case is made by.
type Options struct {
	Table       *Table
	Environment map[string]string // ours, which processes of this machine inherit
	Concurrency int               // of the failing arm; 0 takes what the server serves at once, at most 80
}

// Case is a case to be written, and what was thought of each setting.
type Case struct {
	Text    string
	Factors []Factor
	LeftOut []LeftOut // settings that aren't varied
	Off     []string  // suspects that the server doesn't have on
	Todo    []string  // what a person has to do before it works
}

// Factor is a suspect that is varied.
type Factor struct {
	Name    string
	Suspect string
	Safe    string
	Odds    float64
	Attest  string
	Why     string

	suspect, safe level
}

// LeftOut is a setting that isn't varied.
type LeftOut struct {
	Process string
	Setting string
	Why     string
}

// level is a level's value as a case has it: a text, a list, or null.
type level struct {
	none bool
	list bool
	text []string
}

func textLevel(s string) level      { return level{text: []string{s}} }
func listLevel(args []string) level { return level{list: true, text: args} }
func (l level) equal(m level) bool {
	return l.none == m.none && l.list == m.list && slices.Equal(l.text, m.text)
}

func (l level) named(r design.Role) design.Level {
	if l.none || l.list || l.text[0] == "" {
		return design.Level{Name: string(r), Role: r}
	}
	return design.Level{Name: l.text[0], Role: r}
}

func (l level) String() string {
	switch {
	case l.none:
		return "not set"
	case len(l.text) == 0:
		return "-"
	}
	return strings.Join(l.text, " ")
}

// process is one that the case is being made of.
type process struct {
	Process
	engine string
	own    bool // the program is the engine's, so that it takes all its flags
	words  []word
	env    map[string]word
	dir    string
}

// pick is a suspect that is on in a process.
type pick struct {
	suspect, safe level
	attest        string
	put           func(factor string) // puts the factor in its place
}

// Make makes a case of a live server.
func Make(s Server, o Options) *Case {
	m := maker{Server: s, Options: o, out: &Case{}}
	if len(s.Processes) == 0 {
		m.todo("its processes aren't on this machine: run culprit init where they are, or give --host, to see how it is started")
	}
	for _, p := range s.Processes {
		m.process(p)
	}
	m.factors()
	m.settle()
	m.out.Text = m.text()
	return m.out
}

type maker struct {
	Server
	Options
	out       *Case
	processes []*process
	forbidden [][2]string // factor that can't be safe while the other isn't
}

func (m *maker) process(p Process) {
	var facts *target.ProcessFacts
	for i, f := range m.Live.Processes {
		if f.Name == p.Name && f.Main {
			facts = &m.Live.Processes[i]
			break
		}
	}
	if facts == nil || len(facts.Args) == 0 {
		m.todo("the command line of process %s can't be read, so it isn't here: run culprit init as the user whose process it is", p.Name)
		return
	}
	out := &process{Process: p, dir: facts.Dir, env: map[string]word{}}
	for _, a := range facts.Args {
		out.words = append(out.words, word{text: a})
	}
	out.engine, out.own = engineOf(facts.Args, m.Live.Engine)
	out.fixPort(cmp.Or(p.URL, m.BaseURL))
	for name, value := range facts.Env {
		if !slices.ContainsFunc(m.Table.Environment, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			continue
		}
		same := p.Host == "" && m.Environment[name] == value
		switch {
		case strings.Contains(value, target.Redacted):
			if p.Host == "" && m.Environment[name] != "" {
				break // it is inherited
			}
			m.todo("process %s had the variable %s, which is a secret: set it in the shell in which you run culprit", p.Name, name)
		case !same:
			out.env[name] = word{text: value}
		}
	}
	if len(facts.Args) == 1 && strings.Contains(facts.Args[0], "::") {
		m.todo("process %s has written the title %s over its command line: put the command that starts it there", p.Name, facts.Args[0])
	}
	if p.Container {
		m.todo("process %s runs in a container: put what starts and ends that in place of its command (start: [docker, run, -d, ...], stop: [docker, rm, -f, ...]; docs/case.md)", p.Name)
	}
	m.processes = append(m.processes, out)
}

// fixPort writes the port where the process answers in the place of one that
// it picks: a case asks at one URL.
func (p *process) fixPort(base string) {
	u, err := url.Parse(base)
	if err != nil {
		return
	}
	for _, o := range find(p.words, "--port=") {
		switch {
		case o.value != "0":
		case o.joined:
			p.words[o.at].text = o.flag + "=" + u.Port()
		default:
			p.words[o.at+1].text = u.Port()
		}
	}
}

func (m *maker) todo(format string, args ...any) {
	m.out.Todo = append(m.out.Todo, fmt.Sprintf(format, args...))
}

func (m *maker) leave(p *process, setting, why string) {
	m.out.LeftOut = append(m.out.LeftOut, LeftOut{p.Name, setting, why})
}

// Routes reports whether a command line is that of a program that hands
// requests on to other servers.
func Routes(args []string) bool {
	engine, own := engineOf(args, "")
	return engine == "" && own
}

// programs are words of command lines that run an engine, by the engine.
var programs = []struct {
	engine  string
	command *regexp.Regexp
}{
	{"", regexp.MustCompile(`\b(router|proxy)\b|[_-](router|proxy)`)},
	{"sglang", regexp.MustCompile(`\bsglang\b`)},
	{"vllm", regexp.MustCompile(`\bvllm\b`)},
	{"llama.cpp", regexp.MustCompile(`\bllama-server\b`)},
	{"culprit-lab", regexp.MustCompile(`\blab serve\b`)},
}

// engineOf tells an engine by the program that runs it, or by what the server
// says it is; then own is false, since another program may take other flags.
func engineOf(args []string, says string) (engine string, own bool) {
	program, _ := target.Flags(args)
	if len(program) > 0 {
		program[0] = path.Base(program[0])
	}
	for _, p := range programs {
		if p.command.MatchString(strings.Join(program[:min(len(program), 3)], " ")) {
			return p.engine, true
		}
	}
	return says, false
}

// factors picks the suspects of each process. One that several processes have
// alike is one factor.
func (m *maker) factors() {
	names := map[string]bool{}
	for _, s := range m.suspects() {
		type found struct {
			*process
			*pick
		}
		var all []found
		for _, p := range m.processes {
			if !slices.Contains(strings.Fields(s.Engine), p.engine) && s.Engine != AnyEngine || !m.applies(&s, p) {
				continue
			}
			if k := m.pick(&s, p); k != nil && !m.isSafe(&s, p, k) {
				all = append(all, found{p, k})
			}
		}
		switch {
		case names[s.Name]:
			continue // two engines that have it, or two ways to say it
		case len(all) == 0:
			if !slices.Contains(m.out.Off, s.Name) {
				m.out.Off = append(m.out.Off, s.Name)
			}
			continue
		}
		alike := !slices.ContainsFunc(all, func(f found) bool { return !f.suspect.equal(all[0].suspect) || !f.safe.equal(all[0].safe) })
		var claims []string
		for _, f := range all {
			name := s.Name
			if !alike {
				name += "_" + strings.ReplaceAll(f.Name, "-", "_")
				claims = nil
			}
			claims = append(claims, m.claim(&s, f.process, f.pick))
			f.put(name)
			names[name] = true
			if !alike {
				m.add(&s, name, f.pick, claims)
			}
		}
		if alike {
			m.add(&s, s.Name, all[0].pick, claims)
		}
	}
	m.out.Off = slices.DeleteFunc(m.out.Off, func(name string) bool { return names[name] })
	for _, s := range m.suspects() {
		for _, needed := range s.Needs {
			if names[s.Name] && names[needed] && !slices.Contains(m.forbidden, [2]string{needed, s.Name}) {
				m.forbidden = append(m.forbidden, [2]string{needed, s.Name})
			}
		}
	}
}

// suspects are those of all engines that there are, the likeliest first.
func (m *maker) suspects() []Suspect {
	var all []Suspect
	var engines []string
	for _, p := range m.processes {
		if p.engine == "" || slices.Contains(engines, p.engine) {
			continue
		}
		engines = append(engines, p.engine)
		for _, s := range m.Table.of(p.engine, m.version(p)) {
			if !slices.ContainsFunc(all, func(t Suspect) bool { return t.Name == s.Name && t.Engine == s.Engine }) {
				all = append(all, s)
			}
		}
	}
	return all
}

// version is the server's, or where that is a router, which doesn't say it, the
// process's own.
func (m *maker) version(p *process) string {
	if m.Live.Version != "" {
		return m.Live.Version
	}
	for _, e := range m.Live.Endpoints {
		var said struct {
			Version string `json:"version"`
		}
		if e.Process == p.Name && json.Unmarshal(e.Body, &said) == nil && said.Version != "" {
			return said.Version
		}
	}
	return ""
}

// applies reports whether a suspect's condition holds. One that can't be told
// does.
func (m *maker) applies(s *Suspect, p *process) bool {
	if s.When == "" {
		return true
	}
	ok, err := m.holds(m.of(s.When, p))
	if err != nil && strings.Contains(s.When, "gpus") {
		return len(m.Live.Hosts) == 0 // we looked, and there are none
	}
	return ok || err != nil
}

func (m *maker) holds(expression string) (bool, error) {
	claim, err := target.CompileClaim(expression)
	if err != nil {
		return false, err
	}
	ok, _, err := claim.Holds(m.Live, design.Level{})
	return ok, err
}

var (
	ofServer = regexp.MustCompile(`\b(server_info|model_info|props|env)\.`)
	ofFlag   = regexp.MustCompile(`\bflag\(("[^"]*")\)`)
)

// of makes an expression one about a process, where there are several.
func (m *maker) of(expression string, p *process) string {
	if len(m.processes) < 2 {
		return expression
	}
	expression = ofServer.ReplaceAllString(expression, "processes."+p.Name+".$1.")
	return ofFlag.ReplaceAllString(expression, `flag($1, "`+p.Name+`")`)
}

// says reports whether an expression that the live server answers to holds in
// the levels.
func (m *maker) says(expression string, k *pick) (suspect, safe, answered bool) {
	claim, err := target.CompileClaim(expression)
	if err != nil || !claim.Answered(m.Live) {
		return false, false, false
	}
	suspect, _, err = claim.Holds(m.Live, k.suspect.named(design.Suspect))
	safe, _, err2 := claim.Holds(m.Live, k.safe.named(design.Safe))
	return suspect, safe, err == nil && err2 == nil
}

// isSafe reports whether the server says that it has the safe level, whatever
// it was started with: it has turned off what it can't do.
func (m *maker) isSafe(s *Suspect, p *process, k *pick) bool {
	if s.Attest == "" {
		return false
	}
	suspect, safe, answered := m.says(m.of(s.Attest, p), k)
	return answered && safe && !suspect
}

// claim is what attests a level: the table's expression where the live server
// answers to it, else that of the command line or the environment; empty where
// neither tells one level from the other.
func (m *maker) claim(s *Suspect, p *process, k *pick) string {
	for _, expression := range []string{s.Attest, k.attest} {
		if expression == "" {
			continue
		}
		expression = m.of(expression, p)
		if suspect, safe, answered := m.says(expression, k); answered && suspect && !safe {
			return expression
		}
	}
	return ""
}

func (m *maker) add(s *Suspect, name string, k *pick, claims []string) {
	attest := ""
	if !slices.Contains(claims, "") {
		attest = strings.Join(claims, " and ")
	}
	m.out.Factors = append(m.out.Factors, Factor{
		Name: name, Suspect: k.suspect.String(), Safe: k.safe.String(), Odds: s.odds(), Attest: attest, Why: s.Why,
		suspect: k.suspect, safe: k.safe,
	})
}

// pick finds a suspect in a process; nil where it is off.
func (m *maker) pick(s *Suspect, p *process) *pick {
	switch {
	case len(s.On) > 0:
		return p.pickOn(s)
	case len(s.Off) > 0:
		return p.pickOff(s)
	case len(s.Value) > 0:
		return p.pickValue(s)
	}
	return p.pickVariable(s)
}

func (p *process) pickOn(s *Suspect) *pick {
	on := findAny(p.words, s.On)
	if len(on) == 0 {
		return nil
	}
	places := findAny(p.words, slices.Concat(s.On, s.With))
	_, taken := take(p.words, places, "")
	return &pick{
		suspect: listLevel(taken), safe: listLevel(nil),
		attest: fmt.Sprintf(`(flag(%q) != nil) == (level == "suspect")`, on[0].flag),
		put:    func(factor string) { p.words, _ = take(p.words, places, factor) },
	}
}

func (p *process) pickOff(s *Suspect) *pick {
	if len(findAny(p.words, s.Off)) > 0 || !p.own {
		return nil
	}
	places := findAny(p.words, s.With)
	var taken []string
	if len(places) > 0 {
		_, taken = take(p.words, places, "")
	}
	name, value, assigned := strings.Cut(s.Off[0], "=")
	attest := fmt.Sprintf(`(flag(%q) != nil) == (level == "safe")`, name)
	if assigned {
		attest = fmt.Sprintf(`(flag(%q) == %q) == (level == "safe")`, name, value)
	}
	return &pick{
		suspect: listLevel(taken), safe: listLevel([]string{s.Off[0]}), attest: attest,
		put: func(factor string) { p.words, _ = take(p.words, places, factor) },
	}
}

func (s *Suspect) good(value string) bool {
	return s.Safe != nil && value == *s.Safe || slices.Contains(s.HarmlessValues, value)
}

func (p *process) pickValue(s *Suspect) *pick {
	var flags []string
	for _, f := range s.Value {
		flags = append(flags, f+"=")
	}
	places := findAny(p.words, flags)
	if len(places) == 0 {
		if s.Default == "" || s.good(s.Default) || !p.own {
			return nil
		}
		return &pick{
			suspect: listLevel(nil), safe: listLevel([]string{s.Value[0], *s.Safe}),
			attest: fmt.Sprintf(`(flag(%q) == %q) == (level == "safe")`, s.Value[0], *s.Safe),
			put:    func(factor string) { p.words = append(p.words, word{factor: factor}) },
		}
	}
	last := places[len(places)-1]
	switch {
	case s.good(last.value):
		return nil
	case last.value == "": // a flag that may go without a value
		return &pick{
			suspect: listLevel([]string{last.flag}), safe: listLevel([]string{last.flag, *s.Safe}),
			attest: fmt.Sprintf(`(flag(%q) == %q) == (level == "safe")`, last.flag, *s.Safe),
			put:    func(factor string) { p.words[last.at] = word{factor: factor} },
		}
	}
	return &pick{
		suspect: textLevel(last.value), safe: textLevel(*s.Safe),
		attest: fmt.Sprintf(`flag(%q) == level`, last.flag),
		put: func(factor string) {
			if last.joined {
				p.words[last.at] = word{text: last.flag + "=", factor: factor}
			} else {
				p.words[last.at+1] = word{factor: factor, value: true}
			}
		},
	}
}

func (p *process) pickVariable(s *Suspect) *pick {
	w, set := p.env[s.Env]
	value := w.text
	if !set {
		value = s.Default
	}
	if value == "" || s.good(value) || !set && !p.own {
		return nil
	}
	k := &pick{suspect: level{none: true}, safe: level{none: true}, put: func(factor string) { p.env[s.Env] = word{factor: factor} }}
	if set {
		k.suspect = textLevel(value)
	}
	k.attest = fmt.Sprintf(`(env.%s == nil) == (level == "safe")`, s.Env)
	if s.Safe != nil {
		k.safe = textLevel(*s.Safe)
		k.attest = fmt.Sprintf(`(env.%s == %q) == (level == "safe")`, s.Env, *s.Safe)
	}
	return k
}

// settle says of each flag that is left why it isn't varied, and takes out
// those whose value is a secret.
func (m *maker) settle() {
	for _, p := range m.processes {
		for i := 0; i < len(p.words); i++ {
			w := p.words[i]
			if w.factor != "" || !isFlag(w.text) || i == 0 || w.text == "-m" && i < 3 {
				continue
			}
			head, value, joined := strings.Cut(w.text, "=")
			end := i + 1
			for !joined && end < len(p.words) && p.words[end].factor == "" && !isFlag(p.words[end].text) {
				end++
			}
			if !joined && end > i+1 {
				value = p.words[i+1].text
			}
			switch {
			case !joined && end < len(p.words) && p.words[end].value:
				continue // it is a factor
			case value == target.Redacted:
				m.leave(p, head, "a secret; it isn't in the command here")
				m.todo("process %s had %s, whose value is a secret: it isn't in the command here; add it by hand if the server needs it", p.Name, head)
				if !joined {
					end = i + 2
				}
				p.words = slices.Delete(p.words, i, end)
				i--
			case strings.Contains(value, target.Redacted):
				m.leave(p, head, "has a secret in it: fill it in")
				m.todo("process %s: the value of %s has a secret in it, which isn't here: fill it in", p.Name, head)
			default:
				m.leave(p, strings.TrimSpace(head+" "+value), m.harmless(p, head))
			}
		}
	}
}

func (m *maker) harmless(p *process, flag string) string {
	for _, h := range m.Table.Harmless {
		if slices.ContainsFunc(h.Flags, func(f string) bool { return spelled(f) == spelled(flag) }) {
			return h.Why
		}
	}
	for _, s := range m.suspects() {
		if slices.ContainsFunc(slices.Concat(s.On, s.Off, s.Value, s.With), func(f string) bool {
			name, _, _ := strings.Cut(f, "=")
			return spelled(name) == spelled(flag)
		}) {
			if !m.applies(&s, p) {
				return "what is safe for " + s.Name + " elsewhere isn't for this server"
			}
			return "as " + s.Name + " is safe"
		}
	}
	return "not in the table of suspects: add a factor if it may matter"
}

// limits are what the server says of how much it takes.
func (m *maker) limits() (running, context int) {
	for _, e := range m.Live.Endpoints {
		var said struct {
			MaxRunning any `json:"max_running_requests"`
			Context    any `json:"context_length"`
			Slots      any `json:"total_slots"`
			Generation struct {
				Context any `json:"n_ctx"`
			} `json:"default_generation_settings"`
			Data []struct {
				Context any `json:"max_model_len"`
			} `json:"data"`
		}
		if json.Unmarshal(e.Body, &said) != nil {
			continue
		}
		for _, n := range []any{said.MaxRunning, said.Slots} {
			running = smaller(running, n)
		}
		context = smaller(smaller(context, said.Context), said.Generation.Context)
		if len(said.Data) > 0 {
			context = smaller(context, said.Data[0].Context)
		}
	}
	for _, p := range m.processes {
		for _, o := range findAny(p.words, []string{"--max-num-seqs=", "--max-running-requests="}) {
			if n, err := strconv.Atoi(o.value); err == nil {
				running = smaller(running, float64(n))
			}
		}
	}
	return running, context
}

// smaller takes the smaller of two numbers that are there.
func smaller(known int, n any) int {
	f, ok := n.(float64)
	if !ok || f < 1 || known > 0 && float64(known) <= f {
		return known
	}
	return int(min(f, 1<<30))
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
