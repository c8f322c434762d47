//! What a machine offers to CUDA, found in its file system alone.

use core::fmt;
use std::path::{Path, PathBuf};

/// The driver library's name on Linux.
const LIBRARY: &str = "libcuda.so.1";
/// Where distributions, containers and the Windows subsystem put it, besides `LD_LIBRARY_PATH`.
const LIBRARY_DIRS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];
/// Where the kernel driver states its version.
const VERSION: &str = "proc/driver/nvidia/version";

/// What a machine offers to CUDA: nothing is linked, loaded or opened but text files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// GPU device nodes: `/dev/nvidia0` and so on, `/dev/dxg` in the Windows subsystem.
    pub devices: Vec<PathBuf>,
    /// The first line of `/proc/driver/nvidia/version`.
    pub driver: Option<String>,
    /// The driver library `libcuda.so.1`.
    pub library: Option<PathBuf>,
}

impl Probe {
    /// Looks at this machine.
    pub fn of_this_machine() -> Probe {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let dirs = std::env::split_paths(&path).chain(LIBRARY_DIRS.map(PathBuf::from));
        Probe::below(Path::new("/"), dirs)
    }

    /// Looks below `root`; `dirs` are absolute.
    fn below(root: &Path, dirs: impl Iterator<Item = PathBuf>) -> Probe {
        let entries = std::fs::read_dir(root.join("dev")).into_iter().flatten().flatten();
        let mut devices: Vec<PathBuf> = entries.map(|e| e.path()).filter(|p| is_gpu_node(p)).collect();
        devices.sort();
        let version = std::fs::read_to_string(root.join(VERSION)).ok();
        let driver = version.and_then(|text| text.lines().next().map(|line| line.trim().to_owned()));
        let inside = |dir: PathBuf| dir.strip_prefix("/").map(|d| root.join(d)).unwrap_or(dir).join(LIBRARY);
        let library = dirs.filter(|d| !d.as_os_str().is_empty()).map(inside).find(|p| p.exists());
        Probe { devices, driver, library }
    }

    /// Whether a device node and the driver library are both there.
    pub fn has_gpu(&self) -> bool {
        !self.devices.is_empty() && self.library.is_some()
    }
}

/// `nvidia` and a number, or `dxg`; `nvidiactl`, `nvidia-uvm` and the like are not GPUs.
fn is_gpu_node(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    name == "dxg" || name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok())
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.devices.as_slice() {
            [] => f.write_str("no GPU among /dev/nvidia* and /dev/dxg")?,
            [first] => write!(f, "GPU {}", first.display())?,
            [first, .., last] => write!(f, "{} GPUs, {} to {}", self.devices.len(), first.display(), last.display())?,
        }
        match &self.driver {
            Some(driver) => write!(f, ", driver \"{driver}\"")?,
            None => f.write_str(", no driver version in /proc/driver/nvidia")?,
        }
        match &self.library {
            Some(library) => write!(f, ", {LIBRARY} at {}", library.display()),
            None => write!(f, ", {LIBRARY} not found"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A root directory of its own, removed at the end.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str, files: &[(&str, &str)]) -> Root {
            let root = std::env::temp_dir().join(format!("flash-sampling-probe-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Root(root)
        }

        fn probe(&self) -> Probe {
            Probe::below(&self.0, LIBRARY_DIRS.iter().map(PathBuf::from))
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_machine_without_a_gpu_says_so() {
        let root = Root::new("none", &[("dev/null", ""), ("dev/nvidiactl", ""), ("dev/nvidia-uvm", "")]);
        let probe = root.probe();
        assert_eq!(probe, Probe::default());
        assert!(!probe.has_gpu());
        assert!(probe.to_string().contains("no GPU"));
    }

    #[test]
    fn a_machine_with_gpus_names_them() {
        let files = [
            ("dev/nvidia0", ""),
            ("dev/nvidia1", ""),
            ("dev/nvidiactl", ""),
            ("proc/driver/nvidia/version", "NVRM version: 580.1\nGCC version: 13\n"),
            ("usr/lib64/libcuda.so.1", ""),
        ];
        let root = Root::new("two", &files);
        let probe = root.probe();
        assert_eq!(probe.devices, [root.0.join("dev/nvidia0"), root.0.join("dev/nvidia1")]);
        assert_eq!(probe.driver.as_deref(), Some("NVRM version: 580.1"));
        assert_eq!(probe.library, Some(root.0.join("usr/lib64/libcuda.so.1")));
        assert!(probe.has_gpu() && probe.to_string().starts_with("2 GPUs"));
    }
}
