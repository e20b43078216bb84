package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/mattn/go-runewidth"

	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/target"
)

// tellingPrefixes are of the variables that engines and their libraries read.
var tellingPrefixes = []string{
	"SGLANG_", "SGL_", "VLLM_", "LLAMA_", "GGML_", "CUDA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "LMCACHE_", "UCX_", "NIXL_", "MOONCAKE_",
	"NVIDIA_", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "PYTHON", "LD_", "TLLM_", "DYN_", "OLLAMA_", "RAY_", "SGLANG", "CULPRIT_",
}

// Attestation shows what a live server is.
func Attestation(s *term.Screen, a *target.Attestation) {
	head := strings.TrimSpace(a.Engine + " " + a.Version)
	if head == "" {
		head = "unknown server"
	}
	if a.BaseURL != "" {
		head += " at " + a.BaseURL
	}
	if len(a.Models) > 0 {
		head += ", model " + strings.Join(a.Models, ", ")
	}
	s.Printf("%s\n", s.Paint(term.Safe(head), term.Bold))
	row := func(name, text string) {
		lines := term.Wrap(term.Safe(text), s.Columns()-14)
		if len(lines) == 0 {
			lines = []string{""}
		}
		for i, line := range lines {
			if i > 0 {
				name = ""
			}
			s.Printf("  %s%s\n", s.Paint(fmt.Sprintf("%-12s", name), term.Faint), line)
		}
	}
	for _, p := range a.Processes {
		if p.Main {
			process(row, a, p)
		}
	}
	for _, p := range a.Packages {
		text := fmt.Sprintf("%s %s, %d files, sha256 %.12s, in %s", p.Name, p.Version, len(p.Files), p.SHA256, p.Dir)
		if p.Commit != "" {
			text += fmt.Sprintf(", commit %.12s", p.Commit)
		}
		row("package", text)
		if len(p.Newer) > 0 {
			row("", fmt.Sprintf("%d of its files were written after the start, so that what runs may be older: %s", len(p.Newer), strings.Join(p.Newer[:min(3, len(p.Newer))], ", ")))
		}
	}
	for _, f := range a.Files {
		row("file", fmt.Sprintf("%s, %d bytes, sha256 %.12s", f.Path, f.Size, f.SHA256))
	}
	if len(a.Libraries) > 0 {
		row("libraries", fmt.Sprintf("%d files are mapped to execute code from; %d Python distributions are installed", len(a.Libraries), len(a.Distributions)))
	}
	for _, h := range a.Hosts {
		row("host", strings.TrimPrefix(h.Name+", "+h.Kernel+", "+h.CPU, ", "))
		for _, g := range h.GPUs {
			row("GPU "+g.Index, fmt.Sprintf("%s, %s, driver %s", g.Name, g.Memory, g.Driver))
		}
	}
	for _, e := range a.Endpoints {
		row("answers", fmt.Sprintf("%s%s with %d bytes", e.Process, e.Path, len(e.Body)))
	}
	for _, m := range a.Missing {
		row("missing", m)
	}
}

func process(row func(name, text string), a *target.Attestation, p target.ProcessFacts) {
	children := 0
	for _, q := range a.Processes {
		if q.Name == p.Name && !q.Main {
			children++
		}
	}
	row("process", fmt.Sprintf("%s: %d, since %s, with %d more started by it", p.Name, p.PID, p.Started.Format("2006-01-02 15:04:05 UTC"), children))
	program, flags := target.Flags(p.Args)
	row("command", strings.Join(program, " "))
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		row("", name+" "+flags[name])
	}
	label := "env"
	for _, name := range slices.Sorted(maps.Keys(p.Env)) {
		if slices.ContainsFunc(tellingPrefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			row(label, name+"="+p.Env[name])
			label = ""
		}
	}
	row("executable", p.Exe)
}

// Differences shows what two servers, a and b, don't have alike.
func Differences(s *term.Screen, a, b string, diffs []target.Difference) {
	telling := slices.DeleteFunc(slices.Clone(diffs), func(d target.Difference) bool { return d.Kind == target.NoiseDiff })
	head := fmt.Sprintf("%d differences, the most telling first.", len(telling))
	switch len(telling) {
	case 0:
		head = "No difference that tells anything."
	case 1:
		head = "1 difference."
	}
	s.Printf("%s\n", s.Paint(head, term.Bold))
	s.Printf("  A is %s\n  B is %s\n\n", a, b)
	for _, d := range telling {
		name := term.Safe(d.Name)
		if d.Process != "" {
			name = term.Safe(d.Process) + ": " + name
		}
		kind := s.Paint(fmt.Sprintf("%-9s", d.Kind), term.Faint)
		x, y := term.Safe(d.A), term.Safe(d.B)
		if line := fmt.Sprintf("%s: %s -> %s", name, x, y); runewidth.StringWidth(line)+11 <= s.Columns() {
			s.Printf("  %s%s\n", kind, line)
			continue
		}
		s.Printf("  %s%s\n", kind, name)
		for _, side := range [][2]string{{"A", x}, {"B", y}} {
			s.Printf("             %s  %s\n", side[0], term.Clip(side[1], s.Columns()-16))
		}
	}
	if noise := len(diffs) - len(telling); noise > 0 {
		s.Printf("\n  %d more say nothing (ports, process ids, times): --format json lists them.\n", noise)
	}
}
