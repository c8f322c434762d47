//! The format of a compiled kernel: one file with a header and the machine code.
//!
//! ```text
//! flash-sampling kernel 1
//! kernel fused_hopper.cu
//! instance COLUMNS=8 SLABS=2 CLUSTER=1 OPERAND=BF16
//! architecture sm_90a
//! compiler 13.0
//! recipe 0ff0...             (of file name, options, and the source with every header)
//! bytes 123456
//! hash 0ff0...               (of the machine code)
//!
//! (the machine code)
//! ```
//!
//! A rename puts a complete file in place. The header has all information that a host without a compiler needs.

use core::fmt;
use core::str::FromStr;

/// The first line. Each format has its own number.
const MAGIC: &str = "flash-sampling kernel 1";
/// The file name extension.
pub(crate) const EXTENSION: &str = "kernel";

/// A version of the run-time compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CompilerVersion {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for CompilerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Parses a version; `None` if the text is not two numbers with a point between them.
fn version(text: &str) -> Option<CompilerVersion> {
    let (major, minor) = text.split_once('.')?;
    Some(CompilerVersion { major: u32::from_str(major).ok()?, minor: u32::from_str(minor).ok()? })
}

/// The header of a compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelHeader {
    /// The source file.
    pub kernel: String,
    /// The macro definitions, as `COLUMNS=8 OPERAND=BF16`.
    pub instance: String,
    /// The target architecture, as `sm_90a`.
    pub architecture: String,
    /// The version of the compiler.
    pub compiler: CompilerVersion,
    /// A hash of the file's name, the options, and the source with every header.
    pub recipe: String,
}

impl KernelHeader {
    /// Returns the file's name. The recipe and the compiler's version make it unique; the rest is for people.
    pub(crate) fn file_name(&self) -> String {
        // A kernel may be in a subfolder; compiled files are not.
        let stem = self.kernel.strip_suffix(".cu").unwrap_or(&self.kernel).replace('/', ".");
        format!("{stem}-{}-{}-{}.{EXTENSION}", self.architecture, self.recipe, self.compiler)
    }

    /// Returns the file's bytes.
    pub(crate) fn seal(&self, code: &[u8]) -> Vec<u8> {
        let KernelHeader { kernel, instance, architecture, compiler, recipe } = self;
        let (bytes, hash) = (code.len(), hash(&[code]));
        let text = format!(
            "{MAGIC}\nkernel {kernel}\ninstance {instance}\narchitecture {architecture}\ncompiler {compiler}\n\
             recipe {recipe}\nbytes {bytes}\nhash {hash}\n\n"
        );
        [text.as_bytes(), code].concat()
    }
}

/// Parses a file's name into recipe and compiler version.
pub(crate) fn of_file_name(name: &str) -> Option<(&str, CompilerVersion)> {
    let (rest, compiler) = name.strip_suffix(EXTENSION)?.strip_suffix('.')?.rsplit_once('-')?;
    Some((rest.rsplit_once('-')?.1, version(compiler)?))
}

/// Parses a file into header and machine code; `None` if the file is incomplete or has another format.
pub(crate) fn open(file: &[u8]) -> Option<(KernelHeader, &[u8])> {
    let end = file.windows(2).position(|pair| pair == b"\n\n")?;
    let (text, code) = (str::from_utf8(&file[..end]).ok()?, &file[end + 2..]);
    let mut lines = text.lines();
    if lines.next()? != MAGIC {
        return None;
    }
    let mut field = |name| lines.next()?.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned);
    let label = KernelHeader {
        kernel: field("kernel")?,
        instance: field("instance")?,
        architecture: field("architecture")?,
        compiler: version(&field("compiler")?)?,
        recipe: field("recipe")?,
    };
    let whole = field("bytes")? == code.len().to_string() && field("hash")? == hash(&[code]);
    (whole && !code.is_empty()).then_some((label, code))
}

/// Hashes parts with 128-bit FNV-1a.
///
/// The length of each part follows the part, so different divisions into parts have different hashes. The hash detects
/// damage and distinguishes sources. Folder permissions protect against attacks.
pub(crate) fn hash(parts: &[&[u8]]) -> String {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for part in parts {
        for &byte in part.iter().chain(&(part.len() as u64).to_le_bytes()) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }
    format!("{hash:032x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label() -> KernelHeader {
        KernelHeader {
            kernel: "fused_hopper.cu".into(),
            instance: "COLUMNS=8".into(),
            architecture: "sm_90a".into(),
            compiler: CompilerVersion { major: 13, minor: 10 },
            recipe: hash(&[b"a"]),
        }
    }

    #[test]
    fn hashes_differ_by_every_part() {
        let key = |a: &str, b: &str| hash(&[a.as_bytes(), b.as_bytes()]);
        assert_eq!(key("a", "b"), key("a", "b"));
        assert_ne!(key("ab", ""), key("a", "b"));
        assert_ne!(key("b", "a"), key("a", "b"));
    }

    #[test]
    fn what_is_sealed_is_opened() {
        let below = KernelHeader { kernel: "folder/read.cu".into(), ..label() };
        assert!(below.file_name().starts_with("folder.read-"));
        for label in [label(), KernelHeader { instance: String::new(), ..label() }, below] {
            assert_eq!(open(&label.seal(b"\x7fELF\n\ncode")), Some((label.clone(), &b"\x7fELF\n\ncode"[..])));
            assert_eq!(of_file_name(&label.file_name()), Some((&*label.recipe, label.compiler)));
        }
    }

    #[test]
    fn whatever_is_not_whole_is_nothing() {
        let file = label().seal(b"machine code");
        for end in 0..file.len() {
            assert_eq!(open(&file[..end]), None, "cut at {end}");
        }
        assert_eq!(open(&[&file[..], b"\0"].concat()), None);
        let code = file.len() - 12;
        for at in code..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 4;
            assert_eq!(open(&damaged), None, "bit changed at {at}");
        }
        assert_eq!(open(&label().seal(b"")), None);
        for name in ["x.kernel", "a-b-13.kernel", "a-b-13.0.cubin", "a-b-13.0.kernel.77.part", "-.kernel", ""] {
            assert_eq!(of_file_name(name), None, "{name}");
        }
    }
}
