//! Checks whether AMX may be used: the processor, the operating system's state saving, and its permission.

use core::arch::asm;
use core::arch::x86_64::{__cpuid_count, CpuidResult};

/// Returns the processor's answer to `cpuid`.
fn cpuid(leaf: u32) -> CpuidResult {
    // SAFETY: every x86-64 processor has this instruction. Newer compilers know this.
    #[allow(unused_unsafe)]
    unsafe {
        __cpuid_count(leaf, 0)
    }
}

/// Whether the processor has AMX-BF16 and the operating system grants it.
pub(crate) fn is_available() -> bool {
    let leaf = cpuid(7);
    let (bf16, tile) = (leaf.edx >> 22 & 1, leaf.edx >> 24 & 1);
    bf16 == 1 && tile == 1 && os_keeps_tiles() && request_permission()
}

/// Whether AMX-INT8 may be used.
pub(crate) fn has_integers() -> bool {
    cpuid(7).edx >> 25 & 1 == 1 && is_available()
}

/// Whether the operating system saves the tile state (XCR0 bits 17 and 18).
fn os_keeps_tiles() -> bool {
    if cpuid(1).ecx >> 27 & 1 == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: OSXSAVE is set, so `xgetbv` with register 0 is allowed; it has no other effect.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack)) };
    low >> 17 & 3 == 3
}

/// Requests the tile state from Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for the whole process.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    let result: isize;
    // SAFETY: a system call that only changes what this process may do; rcx and r11 are its clobbers.
    unsafe {
        asm!("syscall", inlateout("rax") 158isize => result, in("rdi") 0x1023, in("rsi") 18,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}
