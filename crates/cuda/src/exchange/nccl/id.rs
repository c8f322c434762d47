//! The id that ranks of an NCCL group share before they connect.

use super::{failed, is_present};
use crate::error::CudaError;
use core::fmt;
use cudarc::nccl::{result, sys};

const SIZE: usize = 128;

/// The id of a group of ranks, created by one rank and shared with all ranks as bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId([u8; SIZE]);

impl fmt::Debug for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NcclId").finish_non_exhaustive()
    }
}

impl NcclId {
    /// Creates the id of a new group.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] if NCCL cannot be loaded; [`CudaError::Nccl`].
    pub fn new() -> Result<NcclId, CudaError> {
        if !is_present() {
            return Err(CudaError::unavailable("the library libnccl cannot be loaded"));
        }
        let id = result::get_uniqueid().map_err(failed("name a group"))?;
        Ok(NcclId(id.internal.map(|byte| byte.to_ne_bytes()[0])))
    }

    /// The bytes of the id.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Creates an id from bytes; `None` if their number is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<NcclId> {
        bytes.try_into().ok().map(NcclId)
    }

    pub(crate) fn raw(&self) -> sys::ncclUniqueId {
        sys::ncclUniqueId { internal: self.0.map(|byte| byte as core::ffi::c_char) }
    }
}
