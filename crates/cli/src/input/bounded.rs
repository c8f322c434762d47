//! Files with a size limit.

use crate::input::Problem;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Limit of parameter files and configurations, in MiB.
pub(crate) const PARAMETERS: u64 = 64;
/// Limit of `tokenizer.json`, in MiB. A large vocabulary takes 35.
pub(crate) const TOKENIZER: u64 = 256;

/// Reads a file of at most `limit` MiB. Reading an endless device or pipe stops at the limit.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, Problem> {
    let (mut bytes, most) = (Vec::new(), limit << 20);
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(Problem::TooLarge { limit }) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_limit_is_read_and_a_larger_file_is_refused() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("x");
        for (more, fits) in [(0, true), (1, false)] {
            std::fs::write(&path, vec![7; (1 << 20) + more]).unwrap();
            let read = read(&path, 1);
            assert_eq!(read.is_ok(), fits, "{more}");
            assert!(fits || read.is_err_and(|error| error.to_string() == "the file is larger than the limit of 1 MiB"));
        }
    }

    #[test]
    #[cfg(unix)]
    fn an_endless_device_is_refused() {
        assert!(matches!(read(Path::new("/dev/zero"), 2), Err(Problem::TooLarge { limit: 2 })));
    }
}
