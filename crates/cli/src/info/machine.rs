//! The machine in reports and records.

use crate::output::line;
use flash_sampling::Isa;
use serde::Serialize;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// Processor, memory and platform.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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
    utc(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()))
}

/// A Unix time as a date; the days are counted in years that begin in March (Hinnant, "chrono-compatible low-level date
/// algorithms").
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_212_581), "2026-11-20T22:09:41Z");
    }
}
