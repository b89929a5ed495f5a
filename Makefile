# Targets that users of the earlier providers know, each a line of trl-remote (docs/reference/remote.md#make).
# All but `evaluate` need a running service: ./scripts/run-remote-fsdp-server.sh
PYTHON ?= .venv/bin/python
TRL_REMOTE = $(PYTHON) -m llama_stack_provider_trl_remote
MODEL ?= quickstart-output/base-model
MONITOR ?= true
VIZ_PORT ?= 8322
OUTPUT ?= training.html
# Not MASTER_ADDR, which torchrun's users have in their environment, but for the target that is about it.
HEAD = 127.0.0.1
export TRL_SERVICE_URL ?= http://$(HEAD):$(VIZ_PORT)
needed = "$(or $($(1)),$(error $(1) is not set: make $@ $(1)=...))"
.PHONY: help train train-resume evaluate train-distributed train-multi-node export-viz

# What each target takes: the comment above it.
help:
	@awk '/^# /{comment = substr($$0, 3)} /^[a-z-]+:$$/{printf "%-18s %s\n", $$1, comment}' $(firstword $(MAKEFILE_LIST))

# DATA_PATH: rows. MODEL. MONITOR=false: submit the job and do not follow it. VIZ_PORT: port of the service.
train:
	$(TRL_REMOTE) train $(call needed,DATA_PATH) --model "$(MODEL)" $(if $(filter true,$(MONITOR)),,--detach) $(ARGS)

# CHECKPOINT: a paused job; or with CONFIG, a job's file, JOB or JOB/checkpoint-N from which a new job of that file begins.
train-resume:
	$(TRL_REMOTE) $(if $(CONFIG),run "$(CONFIG)" --resume-from,resume) $(call needed,CHECKPOINT) $(ARGS)

# MODEL, and DATA: held-out rows. Pairs need ARGS="--reference BASE".
evaluate:
	$(TRL_REMOTE) evaluate "$(MODEL)" $(call needed,DATA) $(ARGS)

# WORLD_SIZE: ranks. CONFIG: a job's file, such as one of examples/recipes.
train-distributed:
	$(TRL_REMOTE) run $(call needed,CONFIG) --nproc-per-node $(call needed,WORLD_SIZE) $(ARGS)

# NODE_RANK 1 and more: this machine becomes a node of the service on MASTER_ADDR. NODE_RANK=0: submit the job there.
train-multi-node: HEAD = $(or $(MASTER_ADDR),127.0.0.1)
train-multi-node:
	$(TRL_REMOTE) $(if $(filter-out 0,$(NODE_RANK)),agent,run $(call needed,CONFIG) --nodes $(call needed,NUM_NODES)) $(ARGS)

# OUTPUT: a .png, .svg or .html file. JOB: one or several (the newest).
export-viz:
	$(TRL_REMOTE) plot $(JOB) -o "$(OUTPUT)" $(ARGS)
