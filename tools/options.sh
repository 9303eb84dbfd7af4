#!/usr/bin/env bash
# tools/options.sh: writes the tables of docs/options.md, all that is below its marker, from the public headers.
# tools/options.sh --show prints the page instead.
set -euo pipefail
cd "$(dirname "$0")/.."
page=docs/options.md
marker='<!-- tools/options.sh writes the rest of this page from the comments in the headers. -->'

# What is behind `detail` holds options of public functions.
mapfile -t headers < <(cd include/accelerate && find . -name '*.h' \( -not -path './detail/*' -o -path './detail/accelerator/model_core.h' \
  -o -path './detail/comm/tensor_operations.h' -o -path './detail/core/split_range.h' \) | sed 's|^\./||' | LC_ALL=C sort)
table() { (cd include/accelerate && awk -f ../../tools/options.awk "$@"); }

# section TITLE PATTERN...: those headers that fit, in the order of the patterns, and no section before has had.
section() {
  local title=$1 pattern header text files=() rest=()
  shift
  for pattern; do
    rest=()
    for header in "${headers[@]}"; do
      # shellcheck disable=SC2053  # it is a pattern
      if [[ $header == $pattern ]]; then files+=("$header"); else rest+=("$header"); fi
    done
    headers=("${rest[@]}")
  done
  [ ${#files[@]} -ne 0 ] || return 0
  text=$(table "${files[@]}")
  [ -z "$text" ] || printf '\n## %s\n%s\n' "$title" "$text"
}

tables() {
  local all=("${headers[@]}")
  section 'Accelerator' accelerator/options.h accelerator.h accelerator/scopes.h detail/accelerator/model_core.h local_sgd.h
  section 'Handlers, plugins and configurations' kwargs.h kwargs/plugins.h parallelism_config.h kwargs/parallelism_handlers.h \
    kwargs/fp8_recipes.h kwargs/deepspeed_plugin.h kwargs/megatron_plugin.h
  section 'Data' data/options.h data/prepare_options.h data/gather_for_metrics.h samplers.h 'data/*'
  section 'Tensors and objects between processes' 'operations/*' detail/comm/tensor_operations.h detail/core/split_range.h
  section 'Optimizers' optim/options.h
  section 'Schedulers' 'scheduler/*'
  section 'Processes and state' state/partial_state_options.h state/accelerator_state.h launchers.h random.h memory.h
  section 'Configuration files' config.h
  section 'Big models' 'big_modeling/*'
  section 'Other' '*'
  table -v part=enums "${all[@]}"
}
text=$(sed '/^<!-- tools\/options.sh/,$d' "$page"; echo "$marker"; tables)
if [ "${1:-}" = --show ]; then printf '%s\n' "$text"; else printf '%s\n' "$text" >"$page"; fi
