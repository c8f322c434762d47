//! `flash-sampling info`: processor, kernels and GPUs of this machine.

pub mod machine;

use crate::args::Format;
use crate::error::CommandError;
use flash_sampling::{DType, Isa};
use machine::{Machine, proc_value};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;

/// The output of `info`.
#[derive(Debug, Serialize)]
struct Info {
    version: &'static str,
    machine: Machine,
    /// Whether AMX can be used.
    amx: &'static str,
    /// Weight type, type of the hidden states, and the instruction set of their kernel.
    kernels: Vec<(&'static str, &'static str, &'static str)>,
    /// The first GPU, or why the CUDA backend cannot run.
    cuda_backend: String,
    /// The run-time compiler.
    cuda_compiler: String,
    /// Folders of compiled kernels, with a summary of each.
    cuda_kernels: Vec<(PathBuf, String)>,
}

/// Whether AMX can be used: Linux grants its registers to a process on request.
fn amx() -> &'static str {
    let flags = proc_value("/proc/cpuinfo", "flags").unwrap_or_default();
    let is_present = ["amx_tile", "amx_bf16"].iter().all(|amx| flags.split(' ').any(|flag| flag == *amx));
    match (is_present, Isa::Amx.is_available()) {
        (_, true) => "the processor has it, and Linux permits its use",
        (true, false) => "the processor has it, but Linux does not permit its use",
        (false, false) => "the processor does not have it",
    }
}

/// The CUDA backend, the run-time compiler, and the folders of compiled kernels by priority.
#[cfg(feature = "cuda")]
fn cuda() -> (String, String, Vec<(PathBuf, String)>) {
    use flash_sampling::cuda::{Device, ahead, cache, compiler};
    let backend = Device::new(0).and_then(|device| {
        let (major, minor) = device.capability();
        let (name, units) = (device.name()?, device.multiprocessors());
        let kernel = match (major, minor) {
            (9, 0) => "runs the Hopper kernel",
            (8.., _) => "runs the portable kernel",
            _ => "is too old",
        };
        Ok(format!("{name}, compute capability {major}.{minor}, {units} multiprocessors; {kernel}"))
    });
    let compiler = compiler().map_or_else(
        || "libnvrtc cannot be loaded; `kernels build` on a machine with NVRTC compiles ahead of time".to_owned(),
        |version| format!("NVRTC {version}"),
    );
    let summary = |folder: &PathBuf| match cache::list(folder) {
        Err(error) => format!("not used: {error}"),
        Ok(kept) => {
            let current: Vec<_> = kept.iter().filter(|kept| ahead::is_current(&kept.label)).collect();
            let mut names: Vec<_> = current.iter().map(|kept| &*kept.label.architecture).collect();
            names.sort_unstable();
            names.dedup();
            let of = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
            format!("{} compiled kernels{of}, {} of other versions", current.len(), kept.len() - current.len())
        }
    };
    let folders = cache::ahead().into_iter().chain(cache::folder());
    let folders = folders.map(|folder| (folder.clone(), summary(&folder))).collect();
    (backend.unwrap_or_else(|error| error.to_string()), compiler, folders)
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> (String, String, Vec<(PathBuf, String)>) {
    let lacks = "this build has no feature 'cuda' (build with --features cuda)";
    (lacks.into(), lacks.into(), Vec::new())
}

impl Info {
    fn of_this_machine() -> Self {
        let types = [DType::BF16, DType::F16, DType::F32];
        let pairs = types.iter().flat_map(|&weight| types.map(|hidden| (weight, hidden)));
        let (cuda_backend, cuda_compiler, cuda_kernels) = cuda();
        Info {
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::this(),
            amx: amx(),
            kernels: pairs.map(|(w, h)| (w.name(), h.name(), Isa::best_for(w, h).name())).collect(),
            cuda_backend,
            cuda_compiler,
            cuda_kernels,
        }
    }

    fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        let available = |isa: Isa| if isa.is_available() { "available" } else { "not available" };
        let mut lines = vec![("processor", self.machine.to_string()), ("AMX", self.amx.into())];
        lines.extend(Isa::ALL.map(|isa| ("instruction set", format!("{isa:<10} {}", available(isa)))));
        let kernel = |(weight, hidden, isa): &_| format!("weight {weight:<4} x hidden {hidden:<4} runs on {isa}");
        lines.extend(self.kernels.iter().map(|kernel_of| ("kernel", kernel(kernel_of))));
        lines.push(("cuda", self.cuda_backend.clone()));
        if cfg!(feature = "cuda") {
            lines.push(("cuda compiler", self.cuda_compiler.clone()));
        }
        let folders = self.cuda_kernels.iter();
        lines.extend(folders.map(|(folder, summary)| ("cuda kernels", format!("{}: {summary}", folder.display()))));
        writeln!(out, "flash-sampling {}", self.version)?;
        lines.iter().try_for_each(|(what, text)| writeln!(out, "{what:<18} {text}"))
    }
}

/// Prints the list.
pub fn run(format: Format, out: &mut dyn Write) -> Result<u8, CommandError> {
    let info = Info::of_this_machine();
    let written = match format {
        Format::Text => info.write_text(out),
        Format::Json => serde_json::to_writer(&mut *out, &info).map_err(io::Error::from).and_then(|()| writeln!(out)),
    };
    written.map_err(CommandError::write("to standard output")).map(|()| 0)
}
