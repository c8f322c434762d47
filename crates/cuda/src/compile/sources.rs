//! The embedded sources of the kernels, and the translation unit of a kernel.

/// Lists the kernels, and the headers of each folder of `include/flash_sampling`, as pairs of path and text.
macro_rules! files {
    (kernels: $($kernel:ident)+; headers: $($header:ident)+; $($folder:ident: $($name:ident)+;)+) => {
        &[
            $(files!(@ stringify!($kernel), ".cu"),)+
            $(files!(@ "include/flash_sampling/", stringify!($header), ".cuh"),)+
            $($(files!(@ "include/flash_sampling/", stringify!($folder), "/", stringify!($name), ".cuh"),)+)+
        ]
    };
    (@ $($path:expr),+) => {
        (concat!($($path),+), include_str!(concat!("../../kernels/", $($path),+)))
    };
}

/// All kernels and all headers. A test compares the list with the folder.
const FILES: &[(&str, &str)] = files! {
    kernels: canonical filter_list filter_list_ranks filter_row fused_hopper fused_plain fused_portable near_ties
        peers reduction row_columns row_logprobs row_summary scaled_hidden select shadow standalone stored_scan top_list
        top_p top_p_ranks widen_rows;
    headers: abi element fused_portable head math perturb platform quantised transform warp;
    epilogue: draw partial sample store summary winners;
    exchange: draw_key fan_out gather peer_records peers rank_sums reduction row_contents top_p_block_max_ranks;
    fused_hopper: candidates consume eight_bits filter halve initial_threshold kernel lists load masks_penalties masses
        multiply publish refine scaled_hidden schedule scout store_logits threshold tile upper_dots;
    mainloop: dot_tile load_slab matrices memory plain swizzle tensor;
    noise: bound counter granule log noise philox uniform;
    ptx: address arithmetic atomic cluster convert cp_async early mbarrier mma operand ordered tma wgmma;
    row_summary: call load_part;
    scan: row_lines scan stored;
    selection: block_max_sums block_maxima candidates digit exact_filters filter_call filter_row find_block_maxima
        granule_candidates groups logprob_columns row_filters row_logprobs row_lists team top_p top_p_block_max
        top_p_first_pass top_p_resolve undecided_rows;
    shadow: bounds digits exact_dots pass winners;
    summary: group_summary log_mass mass_histogram row_mass winner;
};

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
