package api

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/culprit-project/culprit/lab"
	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/model"
)

// owner tells clients which server this is.
const owner = "culprit-lab"

type modelInfo struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	Root        string `json:"root"`
	MaxModelLen int    `json:"max_model_len"`
}

func (s *Server) model() modelInfo {
	return modelInfo{s.Model, "model", s.Started.Unix(), owner, s.Model, s.Engine.Context()}
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) *failure {
	answer(w, http.StatusOK, map[string]any{"object": "list", "data": []modelInfo{s.model()}})
	return nil
}

func (s *Server) oneModel(w http.ResponseWriter, r *http.Request) *failure {
	if f := s.knows(r.PathValue("model")); f != nil {
		return f
	}
	answer(w, http.StatusOK, s.model())
	return nil
}

func (s *Server) knows(name string) *failure {
	if name == s.Model {
		return nil
	}
	return &failure{
		status: http.StatusNotFound, param: "model", code: "model_not_found",
		message: fmt.Sprintf("the model %q does not exist here; this server has %q", name, s.Model),
	}
}

// health says that the process answers, not that the engine does.
func (s *Server) health(w http.ResponseWriter, _ *http.Request) *failure {
	w.WriteHeader(http.StatusOK)
	return nil
}

// healthTimeout is how long one token may take.
const healthTimeout = 20 * time.Second

// healthGenerate generates a token, through the same queue as everyone's.
func (s *Server) healthGenerate(w http.ResponseWriter, r *http.Request) *failure {
	ctx, cancel := context.WithTimeout(r.Context(), healthTimeout)
	defer cancel()
	stream, err := s.Engine.Submit(ctx, lab.Request{
		ID:        fmt.Sprintf("HEALTH_CHECK_%d", s.number.Add(1)),
		Prompt:    []model.Token{model.Begin, model.UserRole, model.AssistantRole},
		MaxTokens: 1,
	})
	if err != nil {
		return &failure{status: http.StatusServiceUnavailable, message: err.Error()}
	}
	for {
		select {
		case _, ok := <-stream.Tokens():
			if ok {
				w.WriteHeader(http.StatusOK)
				return nil
			}
			end := stream.Ending()
			return &failure{status: http.StatusServiceUnavailable, message: fmt.Sprintf("no token was generated: %s (%v)", end.Reason, end.Err)}
		case <-ctx.Done(): // the engine may never notice
			return &failure{status: http.StatusServiceUnavailable, message: fmt.Sprintf("no token was generated within %v", healthTimeout)}
		}
	}
}

func (s *Server) serverInfo(w http.ResponseWriter, _ *http.Request) *failure {
	c, stats := s.Engine.Config(), s.Engine.Stats()
	info := map[string]any{
		"version":              s.Version,
		"status":               "ready",
		"started":              s.Started.Format(time.RFC3339),
		"served_model_name":    s.Model,
		"page_size":            c.PageSize,
		"max_running_requests": c.MaxRunning,
		"max_total_tokens":     stats.Pages * c.PageSize,
		"max_total_num_tokens": stats.Pages * c.PageSize,
		"chunked_prefill_size": c.ChunkTokens,

		"disable_overlap_schedule": c.NoOverlap,
		"tp_size":                  c.Ranks,
		"disaggregation_mode":      cmp.Or(string(c.Mode), "null"),

		"disable_radix_cache": c.NoRadix,
		"index_k_dtype":       c.IndexDType.String(),

		"enable_hierarchical_cache": c.HostTokens > 0,
		"hicache_total_tokens":      stats.HostPages * c.PageSize,
		"hicache_mem_layout":        c.HostLayout.String(),
		"hicache_write_policy":      c.WritePolicy.String(),
		"hicache_partial_pages":     c.HostParts,

		"disable_cuda_graph": c.NoGraph,
		"cuda_graph_bs":      c.GraphBatches,
		"disable_alt_stream": c.NoAltStream,
		"stream_jitter":      c.StreamJitter,
		"index_k_store":      indexStore(c.IndexKScatter),
		// Faults aren't told: what the server is made to do wrong is for its tester to find.
		"toggles": append([]string{}, c.Toggle...),

		"workers": c.Workers,

		"num_continuous_decode_steps": c.DecodeSteps,

		"random_seed":          c.Seed,
		"context_length":       s.Engine.Context(),
		"max_req_input_len":    s.Engine.Context() - 1,
		"max_body_bytes":       BodyLimit,
		"max_stop_strings":     MaxStops,
		"max_stop_bytes":       MaxStopBytes,
		"max_top_logprobs":     MaxTopLogprobs,
		"max_request_id_bytes": maxIDBytes,
		"num_running_reqs":     stats.Running,
		"num_queue_reqs":       stats.Waiting,
	}
	maps.Copy(info, s.Info)
	answer(w, http.StatusOK, info)
	return nil
}

// flushCache forgets every prefix; 400 while requests are there, as SGLang.
func (s *Server) flushCache(w http.ResponseWriter, _ *http.Request) *failure {
	err := s.Engine.Flush()
	switch {
	case errors.Is(err, lab.ErrShutDown):
		return &failure{status: http.StatusServiceUnavailable, message: err.Error()}
	case err != nil:
		return bad("", "%v", err)
	}
	answer(w, http.StatusOK, map[string]any{"success": true, "message": "Cache flushed."})
	return nil
}

// abortRequest ends the requests of one id, or all.
func (s *Server) abortRequest(w http.ResponseWriter, r *http.Request) *failure {
	var c struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if f := read(w, r, &c); f != nil {
		return f
	}
	if c.RID == "" && !c.All {
		return bad("rid", `name a request, {"rid": "..."}, or all, {"abort_all": true}`)
	}
	answer(w, http.StatusOK, map[string]any{"aborted": s.Engine.Abort(c.RID, c.All)})
	return nil
}

// metrics writes the engine's counts in Prometheus's text format.
func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) *failure {
	stats := s.Engine.Stats()
	var m metrics
	m.add("gauge", "num_running_reqs", "Requests that have pages.", row{value: uint64(stats.Running)})
	m.add("gauge", "num_queue_reqs", "Requests that wait for pages.", row{value: uint64(stats.Waiting)})
	m.add("gauge", "pages", "Pages of the device's cache.",
		row{`state="free"`, uint64(stats.FreePages)},
		row{`state="used"`, uint64(stats.Pages - stats.FreePages)})
	m.add("gauge", "radix_pages", "Pages of known prefixes, in use or not.", row{value: uint64(stats.CachedPages)})
	m.histogram("step_requests", "Requests in a step.", []histogramRow{{`kind="prefill"`, stats.Prefill}, {`kind="decode"`, stats.Decode}})
	m.add("counter", "prompt_tokens_total", "Tokens of the prompts that were admitted.", row{value: stats.PromptTokens})
	m.add("counter", "cached_tokens_total", "Tokens of prompts that were found in the cache.",
		row{`tier="device"`, stats.CachedTokens - stats.HostTokens}, row{`tier="host"`, stats.HostTokens})
	m.add("counter", "generation_tokens_total", "Tokens that were generated.", row{value: stats.GeneratedTokens})
	m.add("counter", "chunked_prefills_total", "Parts of prompts that left a rest for a later step.", row{value: stats.Chunked})
	m.add("counter", "num_retractions_total", "Running requests that lost their pages for a while.", row{value: stats.Retractions})
	m.add("counter", "evicted_pages_total", "Pages of known prefixes that had to go.",
		row{`tier="device"`, stats.Evicted}, row{`tier="host"`, stats.HostEvicted})
	m.host(stats)
	m.decoder(stats)
	m.transfers(stats)
	var ended []row
	for _, reason := range lab.Reasons() {
		ended = append(ended, row{fmt.Sprintf("outcome=%q", reason), stats.Ended[reason]})
	}
	m.add("counter", "num_requests_total", "Requests that ended.", ended...)
	m.add("counter", "expression_errors_total", "Expressions of the command line that failed; the log says why.", row{value: stats.ExpressionErrors})
	m.add("counter", "tool_replies_total", "Replies in which tool calls were looked for, by their markup: none, as taught, forgiven, or not a call.",
		row{`markup="none"`, s.markup.none.Load()}, row{`markup="strict"`, s.markup.strict.Load()},
		row{`markup="lenient"`, s.markup.lenient.Load()}, row{`markup="malformed"`, s.markup.malformed.Load()})
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write(m.Bytes()) // nobody can be told that the client has gone
	return nil
}

func indexStore(scatter bool) string {
	if scatter {
		return "scatter"
	}
	return "fused"
}

// decoder writes how decode steps ran, and which of the steps that there are
// several of.
func (m *metrics) decoder(stats lab.Stats) {
	d := stats.Decoder
	var replays []row
	for _, batch := range slices.Sorted(maps.Keys(d.Replays)) {
		replays = append(replays, row{fmt.Sprintf("batch=\"%d\"", batch), d.Replays[batch]})
	}
	m.add("counter", "graph_replays_total", "Decode steps that were replayed, by the batch that was captured.", replays...)
	m.add("counter", "eager_decode_steps_total", "Decode steps that weren't.", row{value: d.Eager})
	m.add("gauge", "graph_captures", "Captured decode steps.", row{value: uint64(d.Captures)})
	m.add("gauge", "graph_bytes", "Memory of captured steps: the arena that they share, and what the largest would take without sharing.",
		row{`kind="arena"`, uint64(d.ArenaBytes)}, row{`kind="unshared"`, uint64(d.BufferBytes)})
	var stores, reads []row
	for _, phase := range []struct {
		name string
		model.Counts
	}{{"prefill", stats.PrefillCounts}, {"decode", d.Counts}} {
		stores = append(stores,
			row{fmt.Sprintf(`phase=%q,store=%q`, phase.name, indexStore(false)), phase.FusedStores},
			row{fmt.Sprintf(`phase=%q,store=%q`, phase.name, indexStore(true)), phase.ScatterStores})
		for _, dtype := range []model.IndexDType{model.FP8, model.BF16} {
			reads = append(reads, row{fmt.Sprintf(`phase=%q,reader=%q`, phase.name, dtype), phase.Reads[dtype]})
		}
	}
	m.add("counter", "index_k_stores_total", "Launches of the stores of index keys, one for each layer.", stores...)
	m.add("counter", "index_k_reads_total", "Launches of the readers of index keys, one for each layer.", reads...)
}

// host writes the host tier's counts. Its copies have no rows where there is no
// such tier.
func (m *metrics) host(stats lab.Stats) {
	m.add("gauge", "host_pages", "Pages of the host tier.",
		row{`state="free"`, uint64(stats.HostPages - stats.HostCachedPages)},
		row{`state="used"`, uint64(stats.HostCachedPages)})
	m.add("counter", "backed_up_pages_total", "Pages that were to be copied to the host.",
		row{`outcome="copied"`, stats.BackedUp}, row{`outcome="dropped"`, stats.BackupsDropped})
	m.add("counter", "loaded_pages_total", "Pages, or parts of them, that were loaded from the host.", row{value: stats.Loaded})
	m.add("counter", "layer_waits_total", "How the forward pass found a layer that it came to: nothing was being loaded, it was there, or it had to wait.",
		row{`state="idle"`, stats.Waits.Idle}, row{`state="loaded"`, stats.Waits.Loaded}, row{`state="loading"`, stats.Waits.Loading})
	var calls, tokens []row
	for _, c := range stats.Copies {
		labels := fmt.Sprintf("pool=%q,direction=%q,branch=%q", c.Pool, c.Direction, c.Branch)
		calls, tokens = append(calls, row{labels, c.Calls}), append(tokens, row{labels, c.Tokens})
	}
	m.add("counter", "copies_total", "Copies between the tiers, one for each layer.", calls...)
	m.add("counter", "copied_tokens_total", "Tokens copied between the tiers, once for each layer.", tokens...)
}

// transfers writes what the transfers of a prefill or decode server did.
func (m *metrics) transfers(stats lab.Stats) {
	var polls, bytes []row
	for _, s := range disagg.States() {
		polls = append(polls, row{fmt.Sprintf("state=%q", s), stats.Polls[s]})
	}
	for _, c := range disagg.Components() {
		bytes = append(bytes, row{fmt.Sprintf("component=%q", c), stats.Transfers.Bytes[c]})
	}
	m.add("counter", "transfer_polls_total", "Answers to the question where a transfer stands, which is asked in each step.", polls...)
	m.add("counter", "kv_transfers_total", "Transfers that succeeded.", row{value: stats.Transfers.Transfers})
	m.add("counter", "num_transfer_failed_reqs_total", "Transfers that failed or were aborted.", row{value: stats.Transfers.Failures})
	m.add("counter", "kv_transfer_bytes_total", "Bytes that were sent or received, by component.", bytes...)
	m.add("counter", "kv_transfer_late_total", "Frames that came for transfers that had ended.", row{value: stats.Transfers.Late})
}

// metrics is text in Prometheus's format. All names have one prefix.
type metrics struct{ bytes.Buffer }

const metricPrefix = "culprit_lab_"

type row struct {
	labels string
	value  uint64
}

type histogramRow struct {
	labels string
	lab.Histogram
}

func (m *metrics) head(kind, name, help string) {
	fmt.Fprintf(m, "# HELP %s%s %s\n# TYPE %s%s %s\n", metricPrefix, name, help, metricPrefix, name, kind)
}

func (m *metrics) row(name, labels string, value uint64) {
	if labels != "" {
		labels = "{" + labels + "}"
	}
	fmt.Fprintf(m, "%s%s%s %d\n", metricPrefix, name, labels, value)
}

func (m *metrics) add(kind, name, help string, rows ...row) {
	m.head(kind, name, help)
	for _, r := range rows {
		m.row(name, r.labels, r.value)
	}
}

func (m *metrics) histogram(name, help string, rows []histogramRow) {
	m.head("histogram", name, help)
	for _, r := range rows {
		var count uint64
		for i, n := range r.Counts {
			count += n
			le := strconv.Itoa(1 << i)
			if i == len(r.Counts)-1 {
				le = "+Inf"
			}
			m.row(name+"_bucket", fmt.Sprintf("%s,le=%q", r.labels, le), count)
		}
		m.row(name+"_sum", r.labels, r.Sum)
		m.row(name+"_count", r.labels, count)
	}
}
