//! Peak memory of a piece of work, as the system counts it.

use std::fs;

/// A line `key: N kB` of this process's status, in bytes.
fn status(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// By how many bytes the resident memory of this process rises at its highest while `work` runs; `None` where the
/// system does not tell (it takes Linux, and a writable `/proc/self/clear_refs`).
///
/// What earlier work freed and the allocator kept is not seen, so this comes first in a process.
///
/// # Errors
/// Those of `work`.
pub fn peak_rise<E>(work: impl FnOnce() -> Result<(), E>) -> Result<Option<u64>, E> {
    // 5 resets the peak to the present (proc_pid_clear_refs(5)).
    let before = fs::write("/proc/self/clear_refs", "5").ok().and_then(|()| status("VmRSS"));
    work()?;
    let peak = status("VmHWM");
    Ok(before.zip(peak).map(|(before, peak)| peak.saturating_sub(before)))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_touched_is_counted() {
        let size = 64 << 20;
        let rise = peak_rise(|| {
            let block = std::hint::black_box(vec![1u8; size]);
            drop(block);
            Ok::<_, ()>(())
        });
        if let Some(rise) = rise.unwrap() {
            assert!(rise as usize > size / 2, "{rise}");
        }
    }
}
