//! Detects instructions in machine code that no kernel may have.
//!
//! The assembler of CUDA 13.0 encodes one form of asynchronous copy wrongly (`ptxas`, seen for sm_90a, sm_100a and
//! sm_120a): `LDGSTS [R + UR], desc[UR]`, a copy with a cache policy whose address uses a uniform register. It writes
//! the pair of uniform registers, address and policy, as UR0 and UR1, whatever the pair is. On an H200 this causes an
//! illegal-instruction error. The assembler of 13.5 writes the right pair. The kernels keep these addresses in vector
//! registers (mainloop/tensor.cuh). This module checks that the compiler does not move them back. It rejects the form
//! itself, because a right pair may also be UR0 and UR1.
//!
//! It also detects `R2UR`, a move to a uniform register, between the products of a kernel. Few products are queued
//! ahead. So a loop with descriptors from ordinary registers takes up to 1.05 of the time (docs/kernel-log.md, version
//! 42). The compiler keeps descriptors in uniform registers if it can prove that their inputs are equal in all lanes.
//! Changes elsewhere in a kernel can break this proof.

/// The opcode: the lowest 12 bits of an instruction of 16 bytes.
const OPCODE: u128 = 0xfff;
/// `LDGSTS` with a uniform register in the destination address; without one, the opcode is 0xfae.
const COPY_TO_UNIFORM: u128 = 0xdae;
/// `HGMMA`, a product of a warpgroup.
const PRODUCT: u128 = 0x9f0;
/// `R2UR`, a move to a uniform register.
const MOVE_TO_UNIFORM: u128 = 0x2ca;
/// The flag of a section with instructions.
const EXECUTABLE: u64 = 4;

/// Describes the wrong instructions of a kernel; empty if there are none.
pub(crate) fn faults(code: &[u8]) -> Vec<String> {
    let Some(sections) = executable_sections(code) else {
        return vec!["the compiler's output is no machine code that can be read".to_owned()];
    };
    match sections.into_iter().flat_map(opcodes).filter(|&opcode| opcode == COPY_TO_UNIFORM).count() {
        0 => Vec::new(),
        count => {
            vec![format!("{count} asynchronous copies take their address from a uniform register (LDGSTS [R + UR])")]
        }
    }
}

/// Describes needless waits between the products of a hot kernel; empty if there are none, or no products.
pub(crate) fn delays(code: &[u8]) -> Vec<String> {
    let moves = |section: &[u8]| {
        let opcodes: Vec<_> = opcodes(section).collect();
        let is_product = |opcode: &u128| *opcode == PRODUCT;
        let (first, last) = (opcodes.iter().position(is_product), opcodes.iter().rposition(is_product));
        let between = first.zip(last).map_or(&[][..], |(first, last)| &opcodes[first..last]);
        between.iter().filter(|&&opcode| opcode == MOVE_TO_UNIFORM).count()
    };
    match executable_sections(code).unwrap_or_default().into_iter().map(moves).sum::<usize>() {
        0 => Vec::new(),
        count => {
            vec![format!("{count} moves to uniform registers stand between the products of warpgroups (R2UR, HGMMA)")]
        }
    }
}

/// Returns the opcode of each instruction.
fn opcodes(section: &[u8]) -> impl Iterator<Item = u128> {
    section.as_chunks::<16>().0.iter().map(|bytes| u128::from_le_bytes(*bytes) & OPCODE)
}

/// Returns the executable sections of a 64-bit ELF file; `None` for other bytes, and for a file without such sections.
fn executable_sections(code: &[u8]) -> Option<Vec<&[u8]>> {
    let short = |at: usize| Some(u16::from_le_bytes(code.get(at..at + 2)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(code.get(at..at + 8)?.try_into().ok()?));
    if !code.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (usize::try_from(long(0x28)?).ok()?, usize::from(short(0x3a)?), short(0x3c)?);
    let mut found = Vec::new();
    for i in 0..usize::from(count) {
        let header = table.checked_add(i * size)?;
        if long(header.checked_add(8)?)? & EXECUTABLE == 0 {
            continue;
        }
        let from = usize::try_from(long(header + 24)?).ok()?;
        let length = usize::try_from(long(header + 32)?).ok()?;
        found.push(code.get(from..from.checked_add(length)?)?);
    }
    (!found.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::nvrtc;

    const CONTROL: &str = include_str!("../../kernels/tests/controls/copies_to_uniform.cu");
    const MOVES: &str = include_str!("../../kernels/tests/controls/moves_to_uniform.cu");

    /// The negative control of CI's guard: copies whose addresses this machine's compiler keeps in uniform registers.
    /// Without a cache policy, the same copies are no fault.
    #[test]
    fn copies_to_addresses_in_uniform_registers_are_refused() {
        if !nvrtc::tests::runs(1) {
            return;
        }
        for architecture in ["sm_100a", "sm_120a"] {
            let compiled = |policy: &str| {
                let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".into(), policy.into()];
                faults(&nvrtc::machine_code("a control", CONTROL, &options).unwrap().code)
            };
            let refused = compiled("--define-macro=POLICY=true");
            assert!(
                refused.len() == 1 && refused[0].starts_with("4 asynchronous copies"),
                "{architecture}: {refused:?}"
            );
            assert_eq!(compiled("--define-macro=POLICY=false"), [""; 0], "{architecture}");
        }
    }

    /// Products with descriptors from a value that is not provably equal in all lanes, and from one that is.
    #[test]
    fn moves_between_products_are_refused() {
        if !nvrtc::tests::runs(1) {
            return;
        }
        let compiled = |known: bool| {
            let options =
                ["--gpu-architecture=sm_90a".into(), "--std=c++17".into(), format!("--define-macro=KNOWN={known}")];
            delays(&nvrtc::machine_code("a control", MOVES, &options).unwrap().code)
        };
        let refused = compiled(false);
        assert!(refused.len() == 1 && refused[0].contains("R2UR"), "{refused:?}");
        assert_eq!(compiled(true), [""; 0]);
    }

    #[test]
    fn what_cannot_be_read_is_a_fault() {
        let mut elf = vec![0u8; 64 + 64 + 32];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut put = |at: usize, value: u64| elf[at..at + 8].copy_from_slice(&value.to_le_bytes());
        put(0x28, 64);
        put(0x3a, 64 | 1 << 16);
        put(64 + 8, EXECUTABLE);
        put(64 + 24, 128);
        put(64 + 32, 32);
        put(128, 0x7fae);
        put(144, 0x7fae);
        assert_eq!(faults(&elf), [""; 0]);
        for cut in [0, 5, 63, 100, elf.len() - 1] {
            assert_eq!(faults(&elf[..cut]).len(), 1, "{cut} bytes");
        }
        elf[145] = 0x7d;
        assert!(faults(&elf)[0].starts_with("1 asynchronous"));
        elf[64 + 8] = 0;
        assert_eq!(faults(&elf).len(), 1);
    }
}
