//! The embedded sources of the kernels, and the translation unit of a kernel.

/// A file below `kernels/`, as its path and its text.
macro_rules! file {
    ($path:literal) => {
        ($path, include_str!(concat!("../../kernels/", $path)))
    };
}

/// All kernels and all headers. A test compares the list with the folder.
const FILES: &[(&str, &str)] = &[
    file!("canonical.cu"),
    file!("filter_list.cu"),
    file!("filter_list_ranks.cu"),
    file!("filter_row.cu"),
    file!("fused_hopper.cu"),
    file!("fused_plain.cu"),
    file!("fused_portable.cu"),
    file!("include/flash_sampling/abi.cuh"),
    file!("include/flash_sampling/element.cuh"),
    file!("include/flash_sampling/epilogue/draw.cuh"),
    file!("include/flash_sampling/epilogue/partial.cuh"),
    file!("include/flash_sampling/epilogue/sample.cuh"),
    file!("include/flash_sampling/epilogue/store.cuh"),
    file!("include/flash_sampling/epilogue/summary.cuh"),
    file!("include/flash_sampling/epilogue/winners.cuh"),
    file!("include/flash_sampling/exchange/draw_key.cuh"),
    file!("include/flash_sampling/exchange/fan_out.cuh"),
    file!("include/flash_sampling/exchange/gather.cuh"),
    file!("include/flash_sampling/exchange/peer_records.cuh"),
    file!("include/flash_sampling/exchange/peers.cuh"),
    file!("include/flash_sampling/exchange/rank_sums.cuh"),
    file!("include/flash_sampling/exchange/reduction.cuh"),
    file!("include/flash_sampling/exchange/row_contents.cuh"),
    file!("include/flash_sampling/exchange/top_p_block_max_ranks.cuh"),
    file!("include/flash_sampling/fused_hopper/candidates.cuh"),
    file!("include/flash_sampling/fused_hopper/consume.cuh"),
    file!("include/flash_sampling/fused_hopper/filter.cuh"),
    file!("include/flash_sampling/fused_hopper/fp8.cuh"),
    file!("include/flash_sampling/fused_hopper/halve.cuh"),
    file!("include/flash_sampling/fused_hopper/initial_threshold.cuh"),
    file!("include/flash_sampling/fused_hopper/kernel.cuh"),
    file!("include/flash_sampling/fused_hopper/lists.cuh"),
    file!("include/flash_sampling/fused_hopper/load.cuh"),
    file!("include/flash_sampling/fused_hopper/masks_penalties.cuh"),
    file!("include/flash_sampling/fused_hopper/masses.cuh"),
    file!("include/flash_sampling/fused_hopper/multiply.cuh"),
    file!("include/flash_sampling/fused_hopper/publish.cuh"),
    file!("include/flash_sampling/fused_hopper/refine.cuh"),
    file!("include/flash_sampling/fused_hopper/schedule.cuh"),
    file!("include/flash_sampling/fused_hopper/scout.cuh"),
    file!("include/flash_sampling/fused_hopper/store_logits.cuh"),
    file!("include/flash_sampling/fused_hopper/threshold.cuh"),
    file!("include/flash_sampling/fused_hopper/tile.cuh"),
    file!("include/flash_sampling/fused_hopper/upper_dots.cuh"),
    file!("include/flash_sampling/fused_portable.cuh"),
    file!("include/flash_sampling/head.cuh"),
    file!("include/flash_sampling/mainloop/dot_tile.cuh"),
    file!("include/flash_sampling/mainloop/load_slab.cuh"),
    file!("include/flash_sampling/mainloop/matrices.cuh"),
    file!("include/flash_sampling/mainloop/memory.cuh"),
    file!("include/flash_sampling/mainloop/plain.cuh"),
    file!("include/flash_sampling/mainloop/swizzle.cuh"),
    file!("include/flash_sampling/mainloop/tensor.cuh"),
    file!("include/flash_sampling/math.cuh"),
    file!("include/flash_sampling/noise/bound.cuh"),
    file!("include/flash_sampling/noise/counter.cuh"),
    file!("include/flash_sampling/noise/granule.cuh"),
    file!("include/flash_sampling/noise/log.cuh"),
    file!("include/flash_sampling/noise/noise.cuh"),
    file!("include/flash_sampling/noise/philox.cuh"),
    file!("include/flash_sampling/noise/uniform.cuh"),
    file!("include/flash_sampling/perturb.cuh"),
    file!("include/flash_sampling/platform.cuh"),
    file!("include/flash_sampling/ptx/address.cuh"),
    file!("include/flash_sampling/ptx/arithmetic.cuh"),
    file!("include/flash_sampling/ptx/atomic.cuh"),
    file!("include/flash_sampling/ptx/cluster.cuh"),
    file!("include/flash_sampling/ptx/cp_async.cuh"),
    file!("include/flash_sampling/ptx/early.cuh"),
    file!("include/flash_sampling/ptx/fp8.cuh"),
    file!("include/flash_sampling/ptx/mbarrier.cuh"),
    file!("include/flash_sampling/ptx/mma.cuh"),
    file!("include/flash_sampling/ptx/operand.cuh"),
    file!("include/flash_sampling/ptx/ordered.cuh"),
    file!("include/flash_sampling/ptx/tma.cuh"),
    file!("include/flash_sampling/ptx/wgmma.cuh"),
    file!("include/flash_sampling/quantised.cuh"),
    file!("include/flash_sampling/row_summary/call.cuh"),
    file!("include/flash_sampling/row_summary/load_part.cuh"),
    file!("include/flash_sampling/scan/row_lines.cuh"),
    file!("include/flash_sampling/scan/scan.cuh"),
    file!("include/flash_sampling/scan/stored.cuh"),
    file!("include/flash_sampling/selection/block_max_sums.cuh"),
    file!("include/flash_sampling/selection/block_maxima.cuh"),
    file!("include/flash_sampling/selection/candidates.cuh"),
    file!("include/flash_sampling/selection/digit.cuh"),
    file!("include/flash_sampling/selection/exact_filters.cuh"),
    file!("include/flash_sampling/selection/filter_call.cuh"),
    file!("include/flash_sampling/selection/filter_row.cuh"),
    file!("include/flash_sampling/selection/find_block_maxima.cuh"),
    file!("include/flash_sampling/selection/granule_candidates.cuh"),
    file!("include/flash_sampling/selection/groups.cuh"),
    file!("include/flash_sampling/selection/logprob_columns.cuh"),
    file!("include/flash_sampling/selection/row_filters.cuh"),
    file!("include/flash_sampling/selection/row_logprobs.cuh"),
    file!("include/flash_sampling/selection/row_lists.cuh"),
    file!("include/flash_sampling/selection/team.cuh"),
    file!("include/flash_sampling/selection/top_p.cuh"),
    file!("include/flash_sampling/selection/top_p_block_max.cuh"),
    file!("include/flash_sampling/selection/top_p_first_pass.cuh"),
    file!("include/flash_sampling/selection/top_p_resolve.cuh"),
    file!("include/flash_sampling/selection/undecided_rows.cuh"),
    file!("include/flash_sampling/shadow/bounds.cuh"),
    file!("include/flash_sampling/shadow/digits.cuh"),
    file!("include/flash_sampling/shadow/exact_dots.cuh"),
    file!("include/flash_sampling/shadow/pass.cuh"),
    file!("include/flash_sampling/shadow/winners.cuh"),
    file!("include/flash_sampling/summary/group_summary.cuh"),
    file!("include/flash_sampling/summary/log_mass.cuh"),
    file!("include/flash_sampling/summary/mass_histogram.cuh"),
    file!("include/flash_sampling/summary/row_mass.cuh"),
    file!("include/flash_sampling/summary/winner.cuh"),
    file!("include/flash_sampling/transform.cuh"),
    file!("include/flash_sampling/warp.cuh"),
    file!("near_ties.cu"),
    file!("peers.cu"),
    file!("reduction.cu"),
    file!("row_columns.cu"),
    file!("row_logprobs.cu"),
    file!("row_summary.cu"),
    file!("select.cu"),
    file!("shadow.cu"),
    file!("standalone.cu"),
    file!("stored_scan.cu"),
    file!("top_list.cu"),
    file!("top_p.cu"),
    file!("top_p_ranks.cu"),
    file!("widen_rows.cu"),
];

/// Returns the text of a kernel with every header in place of its first `#include "..."`.
///
/// NVRTC looks names up literally, so it cannot follow includes that are relative to the including file. The cache
/// hashes this one string, which contains all compiled text.
pub(crate) fn translation_unit(kernel: &'static str) -> String {
    let mut unit = String::new();
    append(kernel, &mut Vec::new(), &mut unit);
    unit
}

/// Returns the texts of all embedded files.
#[cfg(test)]
pub(crate) fn texts() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(_, text)| *text)
}

/// Returns the paths of all embedded files.
#[cfg(test)]
pub(crate) fn files() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(path, _)| *path)
}

fn append(path: &str, done: &mut Vec<String>, unit: &mut String) {
    done.push(path.to_owned());
    let text = text(path).expect("the list holds every file that a file of it includes");
    for line in text.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(name) => {
                let name = resolve(path, name);
                if !done.contains(&name) {
                    append(&name, done, unit);
                }
            }
            None if line.trim() == "#pragma once" => {}
            None => {
                unit.push_str(line);
                unit.push('\n');
            }
        }
    }
}

fn text(path: &str) -> Option<&'static str> {
    FILES.iter().find(|(name, _)| *name == path).map(|(_, text)| *text)
}

/// Resolves the path of an included file, relative to the including file or to `include`.
fn resolve(from: &str, name: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in name.split('/') {
        match part {
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let beside = parts.join("/");
    if text(&beside).is_some() { beside } else { format!("include/{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn below(folder: &Path, root: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                below(&path, root, found);
            } else {
                found.insert(path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/"));
            }
        }
    }

    #[test]
    fn every_source_is_embedded() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut found = BTreeSet::new();
        below(&root, &root, &mut found);
        found.retain(|name| !name.starts_with("tests/"));
        assert_eq!(found, FILES.iter().map(|(name, _)| (*name).to_owned()).collect());
    }

    #[test]
    fn a_unit_holds_each_header_once() {
        for kernel in ["fused_hopper.cu", "fused_portable.cu", "fused_plain.cu"] {
            let unit = translation_unit(kernel);
            assert!(!unit.contains("#include \"") && !unit.contains("#pragma once"));
            assert_eq!(unit.matches("using u32 = unsigned int;").count(), 1);
            assert_eq!(unit.matches("struct Winner {").count(), 1);
        }
    }
}
