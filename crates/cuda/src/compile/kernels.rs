//! The list of all kernels and their instances, for loading, building ahead of time and CI.
//!
//! A new kernel needs a file below `kernels/` (listed in sources.rs), a [`KernelSource`] next to the Rust code that
//! launches it, and an entry in [`KERNELS`]. [`Device::module`](crate::Device) loads one instance of a source.

use crate::compile::Architecture;
use crate::device::{fused_hopper, fused_portable, row_columns, scaled_hidden, select, shadow, standalone};
#[cfg(feature = "nccl")]
use crate::exchange::nccl;
use crate::exchange::peers;
use crate::selection::{existing_filters, filtered, row_logprobs, stored_kernels, stored_scan, top_p};
use core::fmt;

/// Every kernel of this crate.
pub(crate) static KERNELS: &[&KernelSource] = &[
    &fused_hopper::SOURCE,
    &scaled_hidden::SOURCE,
    &shadow::SOURCE,
    &fused_portable::TENSOR,
    &fused_portable::PLAIN,
    &select::SOURCE,
    &row_columns::SOURCE,
    &filtered::FILTER_ROW,
    &top_p::SOURCE,
    &row_logprobs::SOURCE,
    &filtered::FILTER_LIST,
    &filtered::FILTER_LIST_RANKS,
    &top_p::RANKS,
    &peers::SOURCE,
    #[cfg(feature = "nccl")]
    &nccl::SOURCE,
    &standalone::SOURCE,
    &existing_filters::WIDEN_ROWS,
    &stored_kernels::ROW_SUMMARY,
    &stored_kernels::TOP_LIST,
    &stored_kernels::NEAR_TIES,
    &stored_kernels::CANONICAL,
    &stored_scan::SOURCE,
];

/// A source file of kernels and its instances.
#[derive(Debug)]
pub(crate) struct KernelSource {
    /// The file below `kernels/`.
    pub(crate) file: &'static str,
    /// Whether the kernels can run on an architecture.
    pub(crate) serves: fn(Architecture) -> bool,
    /// Returns every instance that may be requested.
    pub(crate) instances: fn() -> Vec<Instance>,
}

impl KernelSource {
    /// A source with one instance, without macro definitions.
    pub(crate) const fn single(file: &'static str, serves: fn(Architecture) -> bool) -> KernelSource {
        KernelSource { file, serves, instances: || vec![Instance::new(&[])] }
    }

    /// Like [`KernelSource::single`], but cold: its rare functions are calls, which keep registers in local memory.
    pub(crate) const fn single_cold(file: &'static str, serves: fn(Architecture) -> bool) -> KernelSource {
        KernelSource { file, serves, instances: || vec![Instance::new(&[]).cold()] }
    }

    /// Returns the first instance, which is the only instance of a single source.
    pub(crate) fn instance(&self) -> Instance {
        (self.instances)().swap_remove(0)
    }
}

/// Accepts every GPU that this crate supports: compute capability 8.0 and up.
pub(crate) fn any(architecture: Architecture) -> bool {
    architecture.capability().0 >= 8
}

/// One translation unit: macro definitions for a file of kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    /// Pairs of name (without `FS_`) and value.
    defines: Vec<(&'static str, String)>,
    /// Whether CI rejects spills, local memory and serialised wgmma in the instance.
    pub(crate) hot: bool,
}

impl Instance {
    /// Creates a hot instance in which each macro `FS_<name>` has this value.
    pub(crate) fn new(defines: &[(&'static str, &dyn fmt::Display)]) -> Instance {
        Instance { defines: defines.iter().map(|(name, value)| (*name, value.to_string())).collect(), hot: true }
    }

    /// Marks the instance as not time-critical: CI reports its spills, but accepts them.
    pub(crate) fn cold(self) -> Instance {
        Instance { hot: false, ..self }
    }

    /// Returns the compiler options.
    pub(crate) fn options(&self, architecture: Architecture) -> Vec<String> {
        let of_all = [format!("--gpu-architecture={architecture}"), "--std=c++17".into()];
        let defines = self.defines.iter().map(|(name, value)| format!("--define-macro=FS_{name}={value}"));
        of_all.into_iter().chain(defines).collect()
    }
}

/// Formats as `COLUMNS=8 OPERAND=BF16`, or as nothing if the file has one instance.
impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let defines: Vec<_> = self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&defines.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::loader::Folders;
    use crate::compile::{Request, cache, nvrtc, sources};
    use std::collections::HashSet;

    #[test]
    fn every_kernel_file_is_listed_once_and_its_instances_differ() {
        let listed: Vec<_> = KERNELS.iter().map(|kernel| kernel.file).collect();
        let mut files: Vec<_> = sources::files().filter(|file| file.ends_with(".cu")).collect();
        files.retain(|file| cfg!(feature = "nccl") || *file != "reduction.cu");
        files.sort_unstable();
        let mut sorted = listed.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, files);
        for kernel in KERNELS {
            let names: Vec<_> = (kernel.instances)().iter().map(Instance::to_string).collect();
            assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{}", kernel.file);
            assert!(!names.is_empty() && Architecture::ALL.into_iter().any(kernel.serves), "{}", kernel.file);
        }
    }

    /// Needs the compiler's library, but no GPU. Skips instances that the folders in `FLASH_SAMPLING_KERNELS` have: CI
    /// compiles all instances before its tests.
    #[test]
    fn every_kernel_compiles() {
        if !nvrtc::tests::runs(1) {
            return;
        }
        let instances = |&kernel: &&'static KernelSource| {
            let architecture = Architecture::USUAL.into_iter().find(|a| (kernel.serves)(*a)).unwrap();
            let of_kernel = (kernel.instances)().into_iter().map(move |instance| (kernel, instance, architecture));
            of_kernel.collect::<Vec<_>>()
        };
        let all: Vec<_> = KERNELS.iter().flat_map(instances).collect();
        let folders = Folders { ahead: cache::ahead(), cache: None };
        let compiles = |(kernel, instance, architecture): &(&'static KernelSource, Instance, Architecture)| {
            let request = Request { kernel, instance, architecture: *architecture };
            let code = request.from(&folders, nvrtc::version, || Ok(request.compile()?.code)).unwrap();
            assert!(code.starts_with(b"\x7fELF"), "{} {instance}", kernel.file);
        };
        std::thread::scope(|scope| {
            let (even, odd): (Vec<_>, Vec<_>) = all.iter().enumerate().partition(|(at, _)| at % 2 == 0);
            scope.spawn(move || even.into_iter().for_each(|(_, part)| compiles(part)));
            odd.into_iter().for_each(|(_, part)| compiles(part));
        });
    }
}
