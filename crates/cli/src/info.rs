//! `flash-sampling info`: what this machine has, and what would run on it.

use crate::args::Format;
use crate::error::CommandError;
use crate::machine::Machine;
use flash_sampling::cuda::Probe;
use flash_sampling::{DType, Isa};
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Libraries that backends and transports may use; nothing is loaded, files are looked for.
const LIBRARIES: [&str; 7] =
    ["libcuda.so.1", "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnccl.so.2", "libmpi.so.40", "libmpi.so.12"];
/// Where they are looked for, besides `LD_LIBRARY_PATH`.
const FOLDERS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

/// All that `info` tells.
#[derive(Debug, Serialize)]
struct Info {
    version: &'static str,
    machine: Machine,
    /// Processor features that the kernels ask for, and whether they are there.
    features: Vec<(&'static str, bool)>,
    /// Weight type, hidden type, and the instruction set that runs.
    kernels: Vec<(&'static str, &'static str, &'static str)>,
    /// What the CUDA backend answers.
    cuda_backend: String,
    /// The run-time compiler.
    cuda_compiler: String,
    /// Folders of compiled kernels, and what is in them.
    cuda_kernels: Vec<(PathBuf, String)>,
    cuda: String,
    gpus: Vec<String>,
    /// Library, and the file that was found.
    libraries: Vec<(&'static str, Option<PathBuf>)>,
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<(&'static str, bool)> {
    macro_rules! detected {
        ($($name:tt)*) => { vec![$(($name, is_x86_feature_detected!($name))),*] };
    }
    detected!("avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512bf16" "avx512vnni")
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

/// The names of NVIDIA GPUs, as their kernel driver tells them.
fn gpus() -> Vec<String> {
    let cards = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let model = |card: fs::DirEntry| {
        let text = fs::read_to_string(card.path().join("information")).ok()?;
        Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_owned())
    };
    cards.filter_map(model).collect()
}

/// What the CUDA backend answers when it is asked for the first GPU.
#[cfg(feature = "cuda")]
fn cuda_backend() -> String {
    use flash_sampling::cuda::Device;
    let described = Device::new(0).and_then(|device| {
        let (major, minor) = device.capability();
        let (name, units) = (device.name()?, device.multiprocessors());
        let kernel = match (major, minor) {
            (9, 0) => "runs the Hopper kernel",
            (8.., _) => "runs the portable kernel",
            _ => "is too old",
        };
        Ok(format!("{name}, compute capability {major}.{minor}, {units} multiprocessors; {kernel}"))
    });
    described.unwrap_or_else(|error| error.to_string())
}

#[cfg(not(feature = "cuda"))]
fn cuda_backend() -> String {
    "this build has no feature 'cuda'".to_owned()
}

/// The run-time compiler, which compiles what no folder holds compiled.
#[cfg(feature = "cuda")]
fn cuda_compiler() -> String {
    let found = flash_sampling::cuda::compiler().map(|version| format!("NVRTC {version}"));
    found.unwrap_or_else(|| "libnvrtc cannot be loaded: kernels must have been compiled ahead of time".to_owned())
}

#[cfg(not(feature = "cuda"))]
fn cuda_compiler() -> String {
    cuda_backend()
}

/// Folders of compiled kernels, in the order in which they are looked at.
#[cfg(feature = "cuda")]
fn cuda_kernels() -> Vec<(PathBuf, String)> {
    use flash_sampling::cuda::{ahead, cache};
    let told = |folder: &PathBuf| match cache::list(folder) {
        Err(error) => format!("is not used: {error}"),
        Ok(kept) => {
            let current: Vec<_> = kept.iter().filter(|kept| ahead::is_current(&kept.label)).collect();
            let mut names: Vec<_> = current.iter().map(|kept| &*kept.label.architecture).collect();
            names.sort_unstable();
            names.dedup();
            let of = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
            format!("{} compiled kernels{of}, {} of other sources", current.len(), kept.len() - current.len())
        }
    };
    let folders = cache::ahead().into_iter().chain(cache::folder());
    folders.map(|folder| (folder.clone(), told(&folder))).collect()
}

#[cfg(not(feature = "cuda"))]
fn cuda_kernels() -> Vec<(PathBuf, String)> {
    Vec::new()
}

fn find(library: &str) -> Option<PathBuf> {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).filter(|p| !p.as_os_str().is_empty());
    folders.chain(FOLDERS.iter().map(PathBuf::from)).map(|folder| folder.join(library)).find(|p| Path::exists(p))
}

impl Info {
    fn of_this_machine() -> Self {
        let types = [DType::BF16, DType::F16, DType::F32];
        let pairs = types.iter().flat_map(|&weight| types.map(|hidden| (weight, hidden)));
        Info {
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::this(),
            features: features(),
            kernels: pairs.map(|(w, h)| (w.name(), h.name(), Isa::best_for(w, h).name())).collect(),
            cuda_backend: cuda_backend(),
            cuda_compiler: cuda_compiler(),
            cuda_kernels: cuda_kernels(),
            cuda: Probe::of_this_machine().to_string(),
            gpus: gpus(),
            libraries: LIBRARIES.iter().map(|library| (*library, find(library))).collect(),
        }
    }

    fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        let list = |there: bool| {
            let names = self.features.iter().filter(|(_, has)| *has == there).map(|(name, _)| *name);
            names.collect::<Vec<_>>().join(" ")
        };
        writeln!(out, "flash-sampling {}", self.version)?;
        writeln!(out, "processor          {}", self.machine)?;
        writeln!(out, "features           {}", list(true))?;
        writeln!(out, "features not there {}", list(false))?;
        for isa in Isa::ALL {
            writeln!(
                out,
                "instruction set    {isa:<10} {}",
                if isa.is_available() { "available" } else { "not available" }
            )?;
        }
        for (weight, hidden, isa) in &self.kernels {
            writeln!(out, "kernel             weight {weight:<4} x hidden {hidden:<4} runs on {isa}")?;
        }
        writeln!(out, "cuda               {}", self.cuda_backend)?;
        writeln!(out, "cuda compiler      {}", self.cuda_compiler)?;
        for (folder, told) in &self.cuda_kernels {
            writeln!(out, "cuda kernels       {}: {told}", folder.display())?;
        }
        writeln!(out, "cuda devices       {}", self.cuda)?;
        for gpu in &self.gpus {
            writeln!(out, "gpu                {gpu}")?;
        }
        for (library, found) in &self.libraries {
            match found {
                Some(path) => writeln!(out, "library            {library:<14} at {}", path.display())?,
                None => writeln!(out, "library            {library:<14} not found")?,
            }
        }
        writeln!(
            out,
            "libraries were looked for in LD_LIBRARY_PATH, {}; none of them was loaded for this list",
            FOLDERS.join(", ")
        )
    }
}

/// Tells what this machine has.
///
/// # Errors
/// [`CommandError::Write`].
pub fn run(format: Format, out: &mut dyn Write) -> Result<u8, CommandError> {
    let info = Info::of_this_machine();
    let written = match format {
        Format::Text => info.write_text(out),
        Format::Json => serde_json::to_writer(&mut *out, &info).map_err(io::Error::from).and_then(|()| writeln!(out)),
    };
    written.map_err(CommandError::write("to standard output")).map(|()| 0)
}
