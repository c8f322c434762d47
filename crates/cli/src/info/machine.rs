//! The machine in reports and records.

use crate::output::line;
use flash_sampling::Isa;
use serde::Serialize;
use std::fmt;
use std::time::SystemTime;

/// Processor, memory and platform.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// Hardware threads.
    pub threads: usize,
    /// Memory in bytes, if the system reports it.
    pub memory: Option<u64>,
    /// Architecture and operating system.
    pub platform: String,
    /// The instruction sets of the CPU backend that are available.
    pub instruction_sets: Vec<&'static str>,
}

/// The value of the first line `key ... : value` of a file of `/proc`.
pub(super) fn proc_value(file: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        let name = proc_value("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown processor".into());
        let memory = proc_value("/proc/meminfo", "MemTotal")
            .and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok())
            .map(|kib| kib * 1024);
        Machine {
            processor: name,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory,
            platform: format!("{} {}", std::env::consts::ARCH, std::env::consts::OS),
            instruction_sets: Isa::available().into_iter().map(Isa::name).collect(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.processor, line::count(self.threads, "thread"), self.platform)?;
        match self.memory {
            Some(bytes) => write!(f, ", {:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
            None => Ok(()),
        }
    }
}

/// The time now, as `2026-11-20T22:09:41Z`.
pub fn utc_now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
