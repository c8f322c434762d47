//! Ahead-of-time compilation of all kernels, for hosts with a driver and without a compiler. Needs no GPU.

use crate::compile::kernels::KERNELS;
use crate::compile::{
    Architecture, CompilerVersion, Instance, KernelSource, Request, Resources, cache, instructions, nvrtc, resources,
    sources,
};
use crate::error::CudaError;
use core::ops::ControlFlow;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

/// The instances that [`build`] compiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebuildPolicy {
    /// The instances that the folder lacks, for this compiler and these sources.
    Missing,
    /// All instances.
    All,
    /// All instances, each with the assembler's report ([`Built::report`]).
    Reported,
}

/// One compiled instance of a kernel, in its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Built {
    /// The kernel's source file.
    pub kernel: &'static str,
    /// The macro definitions, as `COLUMNS=8 OPERAND=BF16`.
    pub instance: String,
    /// The target architecture.
    pub architecture: Architecture,
    /// The file of the machine code.
    pub path: PathBuf,
    /// Whether this build compiled the instance; otherwise the file existed.
    pub compiled: bool,
    /// Instructions that the assembler encodes wrongly. No kernel may have any.
    pub errors: Vec<String>,
    /// The report of the compiler, with [`RebuildPolicy::Reported`].
    pub report: Option<Report>,
}

/// The resources and faults of an instance, from the compiler's log and the machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Whether the kernel is hot, so that it must have no faults. A hot kernel is on the path of unfiltered draws with
    /// tensor-core types.
    pub hot: bool,
    /// The resources of the kernel's functions.
    pub resources: Vec<Resources>,
    /// The compiler's warnings.
    pub warnings: Vec<String>,
    /// Faults that a hot kernel must not have: spills, local memory, and tensor-core products that wait for each other
    /// or for moves of their addresses.
    pub faults: Vec<String>,
}

/// An instance and its architecture.
type Part = (&'static KernelSource, Instance, Architecture);

/// Returns the source files of all kernels.
pub fn kernels() -> impl Iterator<Item = &'static str> {
    KERNELS.iter().map(|kernel| kernel.file)
}

/// The instances of a [`build`].
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// The target architectures.
    pub architectures: &'a [Architecture],
    /// The source files; empty for all.
    pub files: &'a [&'a str],
    /// Macro definitions of instances that are left out, such as `OPERAND=F16`.
    pub skip: &'a [&'a str],
}

impl Selection<'_> {
    /// Returns the number of instances.
    pub fn count(&self) -> usize {
        self.parts().len()
    }

    fn parts(&self) -> Vec<Part> {
        let mut wanted = self.architectures.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        let is_skipped =
            |instance: &Instance| instance.to_string().split(' ').any(|define| self.skip.contains(&define));
        let of = |kernel: &&'static KernelSource| -> Vec<Part> {
            let served: Vec<_> = wanted.iter().copied().filter(|architecture| (kernel.serves)(*architecture)).collect();
            let pair = |instance: Instance| served.clone().into_iter().map(move |a| (*kernel, instance.clone(), a));
            (kernel.instances)().into_iter().filter(|instance| !is_skipped(instance)).flat_map(pair).collect()
        };
        KERNELS
            .iter()
            .filter(|kernel| self.files.is_empty() || self.files.contains(&kernel.file))
            .flat_map(of)
            .collect()
    }
}

/// Compiles the selected instances into a folder.
///
/// Several threads compile. `each` receives every finished instance in unspecified order, and may stop the build.
///
/// # Errors
/// [`CudaError::NoCompiler`] without the compiler's library, [`CudaError::Compile`], [`CudaError::Folder`].
pub fn build(
    selection: &Selection<'_>,
    folder: &Path,
    anew: RebuildPolicy,
    threads: usize,
    each: &mut dyn FnMut(Built) -> ControlFlow<()>,
) -> Result<(), CudaError> {
    let version = nvrtc::version().ok_or_else(|| CudaError::NoCompiler { tried: nvrtc::names() })?;
    let parts = selection.parts();
    let (next, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
    let made = |part: &Part| made(part, folder, version, anew);
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..threads.clamp(1, parts.len().max(1)) {
            let sender = sender.clone();
            scope.spawn(|| {
                let sender = sender;
                while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if ended.load(Ordering::Relaxed) || sender.send(made(part)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut outcome = Ok(());
        for built in receiver {
            match built.map(&mut *each) {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => ended.store(true, Ordering::Relaxed),
                Err(error) => {
                    ended.store(true, Ordering::Relaxed);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        outcome
    })
}

/// Returns the file of an instance from the folder, or compiles the instance into the folder.
fn made(part: &Part, folder: &Path, version: CompilerVersion, anew: RebuildPolicy) -> Result<Built, CudaError> {
    let (kernel, instance, architecture) = part;
    let request = Request { kernel, instance, architecture: *architecture };
    let label = request.label(version);
    let built = |path, code: &[u8], compiled, report| Built {
        kernel: kernel.file,
        instance: instance.to_string(),
        architecture: *architecture,
        path,
        compiled,
        errors: instructions::faults(code),
        report,
    };
    if anew == RebuildPolicy::Missing
        && let Some(code) = cache::find(folder, &label.recipe, Some(version))
    {
        return Ok(built(folder.join(label.file_name()), &code, false, None));
    }
    let compiled = if anew == RebuildPolicy::Reported { request.compile_reported()? } else { request.compile()? };
    let path = cache::keep(folder, &label, &compiled.code)
        .map_err(|error| CudaError::Folder { folder: folder.to_owned(), reason: error.to_string() })?;
    let report = (anew == RebuildPolicy::Reported).then(|| {
        let resources = resources::of_log(&compiled.log);
        Report {
            hot: instance.hot,
            faults: [resources::faults(&resources, &compiled.log), instructions::delays(&compiled.code)].concat(),
            warnings: resources::warnings(&compiled.log).collect(),
            resources,
        }
    });
    Ok(built(path, &compiled.code, true, report))
}

/// Whether a file belongs to this program's sources. The program never loads files of older or newer sources.
pub fn is_current(label: &crate::KernelHeader) -> bool {
    let Ok(architecture) = label.architecture.parse() else { return false };
    let of_kernel = KERNELS.iter().filter(|kernel| kernel.file == label.kernel);
    let mut recipes = of_kernel.flat_map(|kernel| {
        let unit = sources::translation_unit(kernel.file);
        let recipe = move |instance: Instance| Request { kernel, instance: &instance, architecture }.recipe(&unit);
        let named = (kernel.instances)().into_iter().filter(|instance| instance.to_string() == label.instance);
        named.map(recipe)
    });
    recipes.any(|recipe| recipe == label.recipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::cache::tests::Folder;

    fn named(names: &[&str]) -> Vec<Architecture> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    const NOTHING: Selection<'_> = Selection { architectures: &[], files: &[], skip: &[] };

    #[test]
    fn each_architecture_has_the_kernels_that_serve_it() {
        let of = |names: &[&str], files: &[&str]| Selection { architectures: &named(names), files, ..NOTHING }.count();
        assert!(of(&["sm_90a"], &["fused_hopper.cu"]) > 0);
        assert_eq!(of(&["sm_80", "sm_90", "sm_100a", "sm_120a"], &["fused_hopper.cu"]), 0);
        for architecture in Architecture::ALL {
            assert!(Selection { architectures: &[architecture], ..NOTHING }.count() > 0, "{architecture}");
        }
        assert_eq!(of(&["sm_80", "sm_80"], &[]), of(&["sm_80"], &[]));
        let each: usize = kernels().map(|file| of(&["sm_80", "sm_90a"], &[file])).sum();
        assert_eq!(each, of(&["sm_80", "sm_90a"], &[]));
        assert_eq!(of(&["sm_80"], &["fused_hopper.cu", "no such file"]), 0);
    }

    #[test]
    fn instances_with_a_skipped_definition_are_left_out() {
        let hopper = named(&["sm_90a"]);
        let all = Selection { architectures: &hopper, files: &["fused_hopper.cu"], skip: &[] };
        let has = |part: &Part, define: &str| part.1.to_string().split(' ').any(|each| each == define);
        let parts = Selection { skip: &["OPERAND=F16", "COLUMNS=1"], ..all }.parts();
        let halves = all.parts().iter().filter(|part| has(part, "OPERAND=F16")).count();
        assert!(halves > 0 && parts.len() == all.count() - halves);
        assert!(parts.iter().any(|part| has(part, "COLUMNS=16")) && !parts.iter().any(|part| has(part, "OPERAND=F16")));
    }

    #[test]
    fn built_kernels_are_listed_as_current_and_a_build_can_stop() {
        if !nvrtc::tests::runs(1) {
            return;
        }
        let folder = Folder::new("ahead-build");
        let mut built = Vec::new();
        // Only the first few instances, because CI builds all of them.
        let mut each = |one| {
            built.push(one);
            ControlFlow::Break(())
        };
        let ampere = named(&["sm_80"]);
        let all = Selection { architectures: &ampere, ..NOTHING };
        build(&all, &folder.0, RebuildPolicy::Reported, 1, &mut each).unwrap();
        let listed = cache::list(&folder.0).unwrap();
        assert_eq!(listed.len(), built.len());
        assert!(!built.is_empty() && built.len() <= all.count());
        for one in &built {
            let label = &listed.iter().find(|kept| kept.path == one.path).unwrap().label;
            assert!(is_current(label));
            assert!(!is_current(&crate::KernelHeader { recipe: "0".into(), ..label.clone() }));
            let resources = &one.report.as_ref().unwrap().resources;
            assert!(resources.iter().any(|f| f.entry && f.registers > 0) && one.errors.is_empty(), "{one:?}");
        }
    }

    #[test]
    fn existing_kernels_are_compiled_again_only_on_request() {
        if !nvrtc::tests::runs(1) {
            return;
        }
        let (folder, both) = (Folder::new("ahead-again"), named(&["sm_80", "sm_90a"]));
        let all = |anew| {
            let mut built = Vec::new();
            let mut each = |one: Built| {
                built.push(one);
                ControlFlow::Continue(())
            };
            let near_ties = Selection { architectures: &both, files: &["near_ties.cu"], skip: &[] };
            build(&near_ties, &folder.0, anew, 2, &mut each).unwrap();
            built.sort_by(|a, b| a.path.cmp(&b.path));
            built
        };
        let first = all(RebuildPolicy::Missing);
        assert!(first.len() == 2 && first.iter().all(|one| one.compiled && one.report.is_none()), "{first:?}");
        let again = all(RebuildPolicy::Missing);
        assert!(again.iter().all(|one| !one.compiled && one.path.exists()), "{again:?}");
        assert!(first.iter().map(|one| &one.path).eq(again.iter().map(|one| &one.path)));
        // A damaged file counts as missing.
        std::fs::write(&first[0].path, b"flash-sampling kernel 1\n").unwrap();
        assert_eq!(all(RebuildPolicy::Missing).iter().filter(|one| one.compiled).count(), 1);
        assert_eq!(all(RebuildPolicy::All), first);
        assert!(all(RebuildPolicy::Reported).iter().all(|one| one.compiled && one.report.is_some()));
    }

    #[test]
    fn a_folder_that_cannot_be_is_refused() {
        if !nvrtc::tests::runs(1) {
            return;
        }
        let file = Folder::new("ahead-file");
        std::fs::write(&file.0, b"").unwrap();
        let ampere = Selection { architectures: &named(&["sm_80"]), ..NOTHING };
        let refused = build(&ampere, &file.0.join("x"), RebuildPolicy::Missing, 1, &mut |_| ControlFlow::Break(()));
        assert!(matches!(refused, Err(CudaError::Folder { .. })), "{refused:?}");
        std::fs::remove_file(&file.0).unwrap();
    }
}
