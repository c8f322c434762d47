//! Checks whether files may be loaded into the GPU. On a GPU, machine code has all rights of this process.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// The largest size that a kernel's file may have. Every kernel is smaller.
const MAX_BYTES: u64 = 64 << 20;

/// Checks that only this user and root may put files into a folder.
///
/// # Errors
/// The system's error, or [`io::ErrorKind::PermissionDenied`] with the reason.
pub(crate) fn folder(path: &Path) -> io::Result<()> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    owned(&metadata)
}

/// Reads a file that only this user and root may write.
///
/// # Errors
/// As [`folder`].
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a file of a kernel's size"));
    }
    owned(&metadata)?;
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(unix)]
fn owned(metadata: &fs::Metadata) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let (user, owner) = (rustix::process::geteuid().as_raw(), metadata.uid());
    judge(user, owner, metadata.mode()).map_err(|why| io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(not(unix))]
fn owned(_: &fs::Metadata) -> io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn judge(user: u32, owner: u32, mode: u32) -> Result<(), &'static str> {
    match (owner == user || owner == 0, mode & 0o022 == 0) {
        (false, _) => Err("its owner is neither this user nor root"),
        (_, false) => Err("its group or everyone may write to it"),
        (true, true) => Ok(()),
    }
}

/// Creates a folder that only this user may write to, and its missing parent folders.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o755);
    builder.create(path)
}

/// Writes a file that only this user may write to.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write;
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o644);
    options.open(path)?.write_all(bytes)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn files_of_others_and_files_that_others_may_write_are_refused() {
        for (user, owner, mode, good) in [
            (7, 7, 0o700, true),
            (7, 0, 0o755, true),
            (0, 0, 0o755, true),
            (7, 8, 0o700, false),
            (0, 8, 0o700, false),
            (7, 7, 0o775, false),
            (7, 7, 0o757, false),
            (7, 0, 0o1777, false),
        ] {
            assert_eq!(judge(user, owner, mode).is_ok(), good, "user {user}, owner {owner}, mode {mode:o}");
        }
    }

    #[test]
    fn the_system_s_answers_reach_the_judge() {
        let root = std::env::temp_dir().join(format!("flash-sampling-trust-{}", std::process::id()));
        make_folder(&root.join("inner")).unwrap();
        let (inner, path) = (root.join("inner"), root.join("inner/file"));
        write(&path, b"code").unwrap();
        let may = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        assert!(folder(&inner).is_ok() && read(&path).unwrap() == b"code");
        assert_eq!(write(&path, b"other").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        may(&path, 0o666);
        assert_eq!(read(&path).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        may(&inner, 0o777);
        assert_eq!(folder(&inner).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(folder(&path).is_err() && read(&inner).is_err() && folder(&root.join("none")).is_err());
        fs::remove_dir_all(&root).unwrap();
    }
}
