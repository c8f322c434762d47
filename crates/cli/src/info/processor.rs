//! Processor features that the CPU kernels use.

use super::machine::proc_value;
use flash_sampling::Isa;

/// Features of x86-64, and whether the processor has them; empty on other architectures.
#[cfg(target_arch = "x86_64")]
pub(super) fn features() -> Vec<(&'static str, bool)> {
    macro_rules! detected {
        ($($name:tt)*) => { vec![$(($name, is_x86_feature_detected!($name))),*] };
    }
    detected!("avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512bf16" "avx512vnni")
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

/// Whether AMX can be used: Linux grants its registers to a process on request.
pub(super) fn amx() -> &'static str {
    let flags = proc_value("/proc/cpuinfo", "flags").unwrap_or_default();
    let is_present = ["amx_tile", "amx_bf16"].iter().all(|amx| flags.split(' ').any(|flag| flag == *amx));
    match (is_present, Isa::Amx.is_available()) {
        (_, true) => "the processor has it, and Linux permits its use",
        (true, false) => "the processor has it, but Linux does not permit its use",
        (false, false) => "the processor does not have it",
    }
}
